"""Budgets: shares of a prefix, and as much of it as holds a share of attention."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from engine_support import tokens
from engine_tiny import tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax import EngineConfig, Request, SamplingParams
from ckv_jax.cli.options import parse_budget
from ckv_jax.config import Budget
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.selection.base import Selection, Share, select_units
from ckv_jax.selection.select import Ends
from ckv_jax.systems import SYSTEMS

TEXT = tokens(16 * 40)
SUFFIX = tokens(7, 1).tolist()


def test_what_a_budget_is() -> None:
    assert Budget.of(0.25) == Budget(most=0.25) and Budget.of(1).exact
    assert Budget.of("mass:0.95") == Budget(mass=0.95)
    found = Budget.of("mass:0.9:0.02-.5")
    assert found == Budget(mass=0.9, least=0.02, most=0.5) and not found.exact
    assert Budget.of("mass:1").exact and not Budget.of("mass:1:0-0.5").exact
    assert (found.floor(100), found.chunks(100), found.floor(1)) == (2, 50, 1)
    assert Budget.of(0.25).chunks(10) == 3 and Budget.of("mass:0.5").floor(100) == 1
    assert parse_budget("0.25") == 0.25 and parse_budget("mass:0.9") == "mass:0.9"


@pytest.mark.parametrize(
    "bad",
    [0, 1.5, float("nan"), True, "mass", "mass:", "mass:0", "mass:1.01", "mass:0.9:0.5", "0.25",
     "mass:0.9:0.5-0.2", "mass:0.9:0-0", "mass:0.9:0-2", "mass:.", "mass:1e-1", None],
)  # fmt: skip
def test_what_is_no_budget(bad: object) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget.of(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget"):
        EngineConfig(budget=bad)  # type: ignore[arg-type]
    if bad is not None:
        with pytest.raises(ValueError, match="budget"):
            Request(prefix=[1], suffix=[1], budget=bad)  # type: ignore[arg-type]


def test_token_selectors_take_a_share_of_tokens(tmp_path: Path) -> None:
    system = dataclasses.replace(SYSTEMS["as-h2o-lfu"], period=1, subperiod=1, pack_layers=1)
    with (
        tiny_engine(tmp_path) as plain,
        plain.variant(dataclasses.replace(plain.config, system=system)) as engine,
    ):
        prefix = engine.ingest(TEXT)
        (result,) = engine.reprefill([Request(prefix=prefix, suffix=[1], budget="mass:0.9")])
        assert isinstance(result.error, ValueError) and "as-h2o-lfu" in str(result.error)


picked = jax.jit(select_units, static_argnums=1)


@settings(deadline=None)  # the first one compiles
@given(
    seed=st.integers(0, 2**32 - 1),
    mass=st.floats(0.0625, 1, width=32),
    sharp=st.floats(0, 8),
    least=st.integers(1, 20),
    most=st.integers(20, 300),
)
def test_covers_what_was_asked_with_as_few_as_can_be(
    seed: int, mass: float, sharp: float, least: int, most: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = np.exp(sharp * rng.standard_normal((1, 300))).astype(np.float32)
    scores[0, 280:] = -np.inf
    limits, floor = np.array([most], np.int32), np.array([least], np.int32)
    share = Share(np.array([mass], np.float32), floor)
    found: Selection = picked(jnp.asarray(scores), 300, limits, count=np.int32(290), share=share)
    everything: Selection = picked(jnp.asarray(scores), 300, limits, count=np.int32(290))
    ids = np.asarray(found.ids)[0]
    count = int((ids >= 0).sum())
    limit = min(most, 280)
    assert least <= count <= limit
    assert np.asarray(found.mass)[0] >= mass or count == limit
    if mass == 1:
        np.testing.assert_array_equal(ids, np.asarray(everything.ids)[0])
    best = np.sort(scores[0, :280].astype(np.float64))[::-1]
    if count > least:  # one less holds less, but for what sums are off
        assert best[: count - 1].sum() <= (mass + 2e-5) * best.sum()


def test_every_period_covers_what_was_asked(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(TEXT)
        for budget, asked in (("mass:0.3", 0.3), ("mass:0.9", 0.9), ("mass:0.05:0.1-1", 0.05)):
            (result,) = engine.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget=budget)])
            trace = result.trace
            assert min(trace.period_attention_mass) >= asked
            selected = [len(ids) for ids in engine.last_selection(prefix)]
            assert trace.period_chunks == selected and trace.chunks["selected"] == sum(selected)
            assert all(max(1, 4 * (":0.1-" in budget)) <= n < 40 for n in selected)
            fewer = max(selected) - 1
            (less,) = engine.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget=fewer / 40)])
            if ":0.1-" not in budget:
                assert min(less.trace.period_attention_mass) < asked + 1e-4
        (capped,) = engine.reprefill(
            [Request(prefix=prefix, suffix=SUFFIX, budget="mass:0.99:0-0.1")]
        )
        assert capped.trace.period_chunks == [4, 4]


def test_a_mass_is_of_what_is_not_always_kept(tmp_path: Path) -> None:
    ends = {0, 36, 37, 38, 39}
    with tiny_engine(tmp_path) as plain:
        system = dataclasses.replace(plain.system, always=Ends())
        with plain.variant(dataclasses.replace(plain.config, system=system)) as engine:
            prefix = engine.ingest(TEXT)
            for asked in (0.1, 0.5, 0.9):
                request = Request(prefix=prefix, suffix=SUFFIX, budget=f"mass:{asked}")
                (found,) = engine.reprefill([request])
                assert all(ends < set(ids.tolist()) for ids in engine.last_selection(prefix))
                assert min(found.trace.period_attention_mass) >= asked
                fewer = (max(found.trace.period_chunks) - len(ends) - 1) / 40
                (less,) = engine.reprefill([dataclasses.replace(request, budget=fewer)])
                assert min(less.trace.period_attention_mass) < asked + 1e-4


def test_all_of_the_mass_is_budget_one_bit_for_bit(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(TEXT)
        whole, mass = engine.reprefill(
            [Request(prefix=prefix, suffix=SUFFIX, budget=one) for one in (1.0, "mass:1.0")]
        )
        np.testing.assert_array_equal(whole.logits, mass.logits)
        (alone,) = engine.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget="mass:1")])
        (again,) = engine.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget=1)])
        np.testing.assert_array_equal(alone.logits, again.logits)
        assert alone.trace.period_chunks == [40, 40]


def test_rows_of_a_batch_have_budgets_of_their_own(tmp_path: Path) -> None:
    budgets = ("mass:0.5", 0.25, "mass:0.8")
    with tiny_engine(tmp_path) as engine:
        prefix, other = engine.ingest(TEXT), engine.ingest(tokens(200, 3))
        requests = [
            Request(prefix=one, suffix=SUFFIX, budget=budget)
            for one, budget in zip((prefix, other, prefix), budgets, strict=True)
        ]
        together = engine.reprefill(requests)
        for request, found in zip(requests, together, strict=True):
            (alone,) = engine.reprefill([request])
            np.testing.assert_allclose(found.logits, alone.logits, atol=1e-4)
            assert found.trace.period_chunks == alone.trace.period_chunks


def test_a_warm_engine_compiles_nothing_for_it(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, nothing_compiled=True) as engine:
        prefix = engine.ingest(TEXT)
        made = engine.layers.programs.made
        [cold] = engine.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget=0.5)])
        assert cold.trace.compiled == engine.layers.programs.made - made > 0
        engine.warmup(prefix, max_suffix=8, budgets=["mass:0.9:0.05-0.5"])
        [warm] = engine.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget=0.5)])
        assert warm.trace.compiled == 0
        before = compilations()
        for seed in range(3):
            suffix = tokens(7, seed).tolist()
            for budget in ("mass:0.9:0.05-0.5", "mass:0.2:0.05-0.5", "mass:0.1:0.05-0.5"):
                engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=budget)])
        assert compilations() == before


def test_texts_go_on_with_what_the_first_token_took(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(TEXT)
        asked = Request(prefix=prefix, suffix=SUFFIX, budget="mass:0.5")
        (said,) = engine.generate(asked, SamplingParams(max_tokens=12), keep_kv=True).results()
        assert len(said.token_ids) == 12
        assert engine.append(said, exact=False).provenance == "budget:mass:0.5"
        whole = dataclasses.replace(asked, budget="mass:1")
        (said,) = engine.generate(whole, SamplingParams(max_tokens=4), keep_kv=True).results()
        assert engine.append(said, exact=False).provenance == "exact"


def test_turns_over_approximate_kv_are_stored_as_they_are(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(140))
        for seed, budget in enumerate((0.2, 0.2, 0.5)):
            first = prefix.num_tokens
            asked = Request(prefix=prefix, suffix=tokens(16, seed).tolist(), budget=budget)
            sampling = SamplingParams(max_tokens=13)
            (said,) = engine.generate(asked, sampling, keep_kv=True).results()
            prefix = engine.append(said, exact=False)
            assert prefix.provenance == "budget:0.2"
            kv = read_kv(engine.store, prefix)
            np.testing.assert_array_equal(kv[:, :, first:], said.completion().kv)


def test_a_turn_over_approximate_kv_is_not_stored_as_exact(tmp_path: Path) -> None:
    """The exact id means exact KV, whatever a turn stood on."""
    sampling = SamplingParams(max_tokens=16)
    with tiny_engine(tmp_path / "a") as engine, tiny_engine(tmp_path / "b") as other:
        document = engine.ingest(tokens(140))
        asked = Request(prefix=document, suffix=tokens(16, 1).tolist(), budget=0.2)
        (first,) = engine.generate(asked, sampling, keep_kv=True).results()
        near = engine.append(first, exact=False)
        assert near.provenance == "budget:0.2"
        assert engine.ingest(near.tokens).provenance == "exact"  # the same tokens, beside it
        again = Request(prefix=near, suffix=tokens(16, 2).tolist(), budget=1.0)
        (second,) = engine.generate(again, sampling, keep_kv=True).results()
        stored = engine.append(second)
        assert stored.provenance == "exact"
        expected = read_kv(other.store, other.ingest(stored.tokens))
        np.testing.assert_allclose(read_kv(engine.store, stored), expected, atol=1e-5)
