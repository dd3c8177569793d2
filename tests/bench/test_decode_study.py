"""The study of decode's choices: groupings, rules that must agree, and its rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.decode_oracle import DecodeOracle, DecodeRule
from bench.decode_study import rules, show, study
from bench.grouping import balanced, by_position, kmeans
from bench.oracle import Oracle
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.weights import load_pretrained
from ckv_jax.storage.grouping import TOGETHER

EXACT = DecodeRule(budget=1.0, index="keys")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_pretrained(reference_folder(), dtype="float32")


@pytest.fixture(scope="module")
def oracle(model: Transformer) -> DecodeOracle:
    page = demo_ledger(0, 512, asked=LEARNED)
    names = ("questions", "lengths", "answers", "families", "needles")
    few = {name: getattr(page, name)[:12] for name in names}
    return DecodeOracle(model, dataclasses.replace(page, **few))


def planted(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Keys [256, 8] of eight far-apart kinds in shuffled runs of four, and each token's kind."""
    kinds = rng.permutation(np.repeat(np.arange(8), 8))
    kind = np.repeat(kinds, TOGETHER)
    corners = 100 * (2.0 * ((np.arange(8)[:, None] >> np.arange(3)) & 1) - 1)
    corners *= np.array([1.0, 2.0, 4.0])  # each halving has a direction of its own
    keys = np.concatenate([corners[kind], np.zeros((256, 5))], axis=1)
    return keys + rng.normal(size=keys.shape), kind


def test_alike_tokens_come_together() -> None:
    keys, kind = planted(np.random.default_rng(0))
    unit = balanced(keys.astype(np.float32), 32)
    assert (np.bincount(unit) == 32).all()
    for each in range(8):
        assert len(set(kind[unit == each])) == 1
    assert (unit.reshape(-1, TOGETHER) == unit[::TOGETHER, None]).all()  # neighbours stay together


def test_clusters_cover_all_tokens_and_separate_what_is_far_apart() -> None:
    keys, kind = planted(np.random.default_rng(1))
    unit = kmeans(keys.astype(np.float32), 8)  # four times as many clusters as kinds
    assert unit.shape == (256,) and unit.max() < 32
    for each in set(unit.tolist()):
        assert len(set(kind[unit == each])) == 1


def test_tokens_that_fill_no_units_are_refused() -> None:
    with pytest.raises(ValueError, match="got 196 tokens in units of 16"):
        balanced(np.zeros((49 * 4, 4), np.float32), 16)
    np.testing.assert_array_equal(by_position(6, 4), [0, 0, 0, 0, 1, 1])


def test_everything_chosen_is_the_dense_pass(oracle: DecodeOracle, model: Transformer) -> None:
    dense = Oracle(model, oracle.page).full().logits
    for rule in (EXACT, dataclasses.replace(EXACT, unit="kmeans", index="means")):
        got = oracle.ask(rule)
        assert np.abs(got.logits - dense).max() < 1e-4 * np.abs(dense).max()
        assert (got.attended == 1).all() and (got.needle == 1).all()


def test_a_token_sees_its_budget_and_the_steady_tokens(oracle: DecodeOracle) -> None:
    tokens = len(oracle.page.tokens)
    for unit in ("position", "balanced"):
        got = oracle.ask(DecodeRule(budget=1 / 16, unit=unit, steady=(0, 0)))
        np.testing.assert_allclose(got.attended, 1 / 16, rtol=1e-6)
    got = oracle.ask(DecodeRule(budget=1 / 16, steady=(16, 64)))
    assert (got.attended >= 80 / tokens).all()
    assert (got.attended <= 80 / tokens + 1 / 16 + 1e-6).all()


def test_coarse_that_leaves_everything_changes_nothing(oracle: DecodeOracle) -> None:
    rule = DecodeRule(budget=1 / 16, index="int4", heads="pooled", every=4)
    plain = oracle.ask(rule)
    coarse = oracle.ask(dataclasses.replace(rule, coarse=16))
    np.testing.assert_array_equal(plain.logits, coarse.logits)
    narrow = oracle.ask(dataclasses.replace(rule, coarse=1))  # the means alone decide
    means = oracle.ask(dataclasses.replace(rule, index="means"))
    np.testing.assert_array_equal(narrow.logits, means.logits)


def test_rows_of_a_run(model: Transformer) -> None:
    pages = [demo_ledger(1, 512, asked=LEARNED)]
    few = {name: rules()[name] for name in ("keys, each head", "bounds of 8, each head")}
    rows = study(model, few, (1 / 16,), pages)
    every = {row["name"]: row for row in rows if row["task"] == "all"}
    assert every["everything"]["accuracy"] >= 0.9  # the checkpoint knows these
    assert every["keys, each head"]["accuracy"] > every["bounds of 8, each head"]["accuracy"]
    assert every["keys, each head"]["needle"] > every["bounds of 8, each head"]["needle"]
    assert "keys, each head" in show(rows)
