"""Dense passes and the oracle agree with the model; digests forget as little as they promise."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.cache_policies import recorded
from bench.digests import KINDS, bytes_per_token, compress
from bench.oracle import Oracle, Rule, best
from bench.selection_study import interval, rules, study, traces
from bench.tasks.batches import ledger_batch, repeats
from bench.tasks.dense import answer_logits, join, split, text_logits
from bench.tasks.initial import initial
from bench.tasks.suffixes import lengthened
from ckv_jax.data import words
from ckv_jax.data.ledger import make_ledger
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer

_CONFIG = ModelConfig(
    vocab_size=len(words.vocabulary()),
    hidden_size=64,
    intermediate_size=64,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return join(initial(_CONFIG, 0), _CONFIG, dtype="float32")


@pytest.fixture(scope="module")
def oracle(model: Transformer) -> Oracle:
    return Oracle(model, make_ledger(np.random.default_rng(1), 256, questions=8))


dense = nnx.jit(lambda model, tokens: model(tokens))


def test_stacked_layers_compute_what_the_model_does(model: Transformer) -> None:
    tokens = jnp.asarray(repeats(np.random.default_rng(0), 2, 24).tokens)
    ours = text_logits(split(model), _CONFIG, tokens)
    np.testing.assert_allclose(ours, dense(model, tokens), rtol=1e-4, atol=1e-4)


def test_a_question_sees_its_prefix_and_itself_alone(model: Transformer) -> None:
    batch = ledger_batch(np.random.default_rng(2), 1, 256, 5)
    ours = answer_logits(split(model), _CONFIG, batch.tokens, batch.questions, batch.lengths)
    for i, length in enumerate(batch.lengths[0]):
        text = np.concatenate([batch.tokens[0], batch.questions[0, i]])[None]  # padded at the end
        last = dense(model, text)[0, len(batch.tokens[0]) + length - 1]
        np.testing.assert_allclose(ours[0, i], last, rtol=1e-3, atol=1e-3)


def test_everything_chosen_is_the_dense_pass(model: Transformer, oracle: Oracle) -> None:
    page = oracle.page
    dense = answer_logits(
        split(model), _CONFIG, page.tokens[None], page.questions[None], page.lengths[None]
    )
    full = oracle.full().logits
    # keys and values of the oracle are rounded to bfloat16, 8 bits of mantissa
    assert np.abs(full - dense[0]).max() < 0.1 * np.abs(dense).max()
    assert np.corrcoef(full.ravel(), np.ravel(dense[0]))[0, 1] > 0.995


@pytest.mark.parametrize(
    "rule",
    [
        Rule(budget=0.25, every=3),
        Rule(budget=0.25, every=2, probe="int8", window=1, over="max"),
        Rule(budget=0.25, every=3, layers=3),
        Rule(budget=0.25, every=3, probe="heads3"),
        Rule(budget=0.25, every=3, suffix=True),
    ],
)
def test_a_group_shares_a_selection_of_the_budget(oracle: Oracle, rule: Rule) -> None:
    chosen = oracle.ask(rule).chosen
    assert (chosen.sum(-1) == rule.count(256)).all()
    lead = chosen[:: rule.every].repeat(rule.every, axis=0)
    assert np.array_equal(chosen, lead)


def test_shares_of_attention_to_the_prefix_alone_or_beside_the_suffix(oracle: Oracle) -> None:
    asked = [oracle.ask(Rule(every=1, suffix=suffix), watch=True) for suffix in (False, True)]
    alone, beside = (answers.scores.sum(-1) for answers in asked)  # [L, Q]
    np.testing.assert_allclose(alone, np.rint(alone), atol=1e-3)  # one of each query and head
    assert (beside < alone - 0.01).all() and (beside > 0).all()


def test_forced_chunks_are_within_the_budget(oracle: Oracle) -> None:
    rule = Rule(budget=0.25, every=1, keep_first=1, keep_last=1)
    chosen = oracle.ask(rule).chosen
    assert chosen[..., 0].all() and chosen[..., -1].all()
    assert (chosen.sum(-1) == 4).all()


def test_the_first_layer_chooses_what_full_attention_would(oracle: Oracle) -> None:
    rule = Rule(budget=0.25, every=1)
    wanted = best(oracle.full().scores, rule.count(256))
    assert np.array_equal(oracle.ask(rule).chosen[0], wanted[0])


def test_each_kv_head_may_choose_its_own(oracle: Oracle) -> None:
    chosen = oracle.ask(Rule(budget=0.25, every=3, heads="each")).chosen.sum(-1)
    assert chosen.min() >= 4 and 4 < chosen.max() <= 16


def test_finer_digests_forget_less() -> None:
    keys = np.random.default_rng(3).normal(size=(1, 512, 2, 16)).astype(np.float32)
    centred = keys - keys.mean(1, keepdims=True)
    error = {kind: np.abs(compress(keys, kind) - centred).mean() for kind in KINDS}
    assert error["int8"] < error["int4"] < error["int3"] < error["pq16"] < error["mean"]
    assert error["pq8"] < error["pq16"]
    with pytest.raises(ValueError, match="got digest 'int5'"):
        compress(keys, "int5")


def test_digest_bytes_of_a_7b_prefix() -> None:
    shape = {"layers": 28, "kv_heads": 4, "dim": 128}
    assert bytes_per_token("keys", **shape) == 28 * 1024
    assert bytes_per_token("int8", **shape) == 28 * (512 + 16)
    assert bytes_per_token("pq16", **shape) * 16 == 28 * 1024


def test_intervals_hold_the_share() -> None:
    low, high = interval(48, 50)
    assert low < 0.96 < high and (low, high) == pytest.approx((0.865, 0.989), abs=2e-3)


def test_a_study_has_a_row_for_every_rule_and_task(model: Transformer) -> None:
    named = {"period 3": Rule(budget=0.25, every=3)}
    pages = [make_ledger(np.random.default_rng(4), 256)]
    rows = study(model, named, pages, say=lambda line: None)
    assert {row["name"] for row in rows} == {"full", "period 3"}
    assert len(rows) == 2 * 6
    assert all(0 <= row["chunk_recall"] <= 1 for row in rows)
    full = [row for row in rows if row["name"] == "full"]
    assert all(row["chunk_recall"] == row["needle"] == 1 for row in full)
    assert len(rules()) > 40


def test_traces_are_what_the_cache_replay_reads(model: Transformer, tmp_path: Path) -> None:
    pages = [make_ledger(np.random.default_rng(seed), 256, questions=5) for seed in (5, 6)]
    named = {"ours": Rule(budget=0.25, every=3, probe="int8"), "theirs": Rule(budget=0.5, every=6)}
    traces(model, named, pages, tmp_path / "traces.npz")
    read = {found.name: found for found in recorded(tmp_path / "traces.npz")}
    assert read["ours"].chunks.shape == (2, 5, 2, 4)
    assert read["theirs"].chunks.shape == (2, 5, 1, 8)
    for found in read.values():
        assert (np.diff(found.chunks, axis=-1) > 0).all() and found.num_chunks <= 16
        assert (found.attention > 0).all() and (found.attention.sum(-1) <= 1).all()
    # the first layer saw what full attention sees, so its choice has the most attention
    full = Oracle(model, pages[0]).full().scores[0]
    shares = np.sort(full / full.sum(-1, keepdims=True), axis=-1)[:, -8:].sum(-1)
    np.testing.assert_allclose(read["theirs"].attention[0, :, 0].sum(-1), shares, rtol=1e-5)


def test_a_window_scores_with_the_question_alone(model: Transformer) -> None:
    page = make_ledger(np.random.default_rng(7), 256, questions=6)
    long = lengthened(page, 32)
    assert long.questions.shape == (6, 32) and (long.lengths == 32).all()
    for row, question, length in zip(long.questions, page.questions, page.lengths, strict=True):
        assert np.array_equal(row[32 - length :], question[:length])
        assert row[31 - length] == words.WORD_IDS["."]
    oracle = Oracle(model, long)
    by_window = [oracle.ask(Rule(budget=0.25, window=w)).chosen for w in (32, None, 2)]
    assert np.array_equal(by_window[0], by_window[1])
    assert not np.array_equal(by_window[1], by_window[2])
    with pytest.raises(ValueError, match="got suffixes of 2 tokens"):
        lengthened(page, 2)
