"""The engine end to end on a real store: what it answers does not depend on how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from engine_support import scale_error, small_engine, tokens
from engine_tiny import TINY, tiny_engine
from slow_reads import slow_reads

from ckv_jax import ContextOverflow, Engine, Request
from ckv_jax.errors import DeadlineExceeded
from ckv_jax.storage.errors import StoreError, StoreUnavailable

SYSTEMS = ["contiguous-kv", "ckv"]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    ("stored", "length", "make"),
    [
        ((256,), 256, tiny_engine),
        ((250,), 250, small_engine),
        ((7,), 7, tiny_engine),
        ((40, 96, 201, 300), 300, tiny_engine),  # many segments
        ((100,), 200, tiny_engine),  # a part is stored, the rest computed
        ((), 40, tiny_engine),
    ],
)
def test_full_budget_equals_recompute(
    tmp_path: Path, system: str, stored: tuple[int, ...], length: int, make: Callable[..., Engine]
) -> None:
    text = tokens(length)
    with make(tmp_path, system=system) as engine:
        prefixes = [engine.ingest(text[:count]) for count in stored]
        assert [prefix.num_tokens for prefix in prefixes] == list(stored)
        assert len(stored) < 2 or len(prefixes[-1].spans) > 1
        # Nothing stored is exact whatever the budget.
        budget = 1.0 if stored else None
        request = Request(prefix=text.tolist(), suffix=tokens(9, 1), budget=budget)
        (result,) = engine.reprefill([request])
        expected = engine.recompute(request)
    assert scale_error(result.logits, expected.logits) < 1e-4
    if not stored:
        np.testing.assert_array_equal(result.logits, expected.logits)
    assert result.token_id == expected.token_id
    assert result.trace.attention_mass == pytest.approx(1.0, abs=1e-5)
    assert (result.trace.bytes["ssd"] > 0) == bool(stored)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_small_budget_reads_less_and_says_what_it_covers(tmp_path: Path, system: str) -> None:
    overrides = {"prefetch": "intra", "period": 2, "subperiod": 1, "pack_layers": 1}
    with small_engine(
        tmp_path, system=system, model=TINY, overrides=overrides, device_cache_bytes=0,
        host_cache_bytes=0,
    ) as engine:  # fmt: skip
        prefix = engine.ingest(tokens(320))
        full, tenth = (
            engine.reprefill([Request(prefix=prefix, suffix=tokens(8, 1), budget=budget)])[0]
            for budget in (1.0, 0.1)
        )
    layout, periods = engine.layout, engine.worker.plan.periods
    assert tenth.trace.chunks == {"selected": 2 * periods, "total": 20 * periods}
    assert 0 < tenth.trace.attention_mass < 1
    assert tenth.trace.bytes["ssd"] < full.trace.bytes["ssd"] / 2
    assert full.trace.bytes["ssd"] >= 20 * layout.chunk_bytes


def test_bad_input_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, system="contiguous-kv") as engine:
        prefix = engine.ingest(tokens(64))
        with pytest.raises(ValueError, match="empty text"):
            engine.ingest([])
        with pytest.raises(ValueError, match="no tokenizer"):
            engine.ingest("text")
        with pytest.raises(ContextOverflow, match="2048"):
            engine.ingest(tokens(3000))
        (result,) = engine.reprefill([Request(prefix=prefix.id[:-2] + "00", suffix=[1])])
        with pytest.raises(StoreError, match=prefix.id[:8]):
            result.raise_for_error()


def test_a_dense_prefill_raises_the_error_of_its_request(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine, pytest.raises(DeadlineExceeded):
        engine.recompute(Request(prefix=[], suffix=[1], deadline_s=1e-9))


def test_a_prefix_that_is_stored_but_cannot_be_opened_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking it up finds the same again: trying again would go on for as long as that."""
    with tiny_engine(tmp_path, system="contiguous-kv") as engine:
        store, reader = engine.store, engine.store.reader

        def busy(*_: object, **__: object) -> NoReturn:
            monkeypatch.setattr(store, "reader", reader)  # who tried again would be answered
            raise StoreUnavailable("no descriptors")

        request = Request(prefix=engine.ingest(tokens(300)), suffix=tokens(5, 1), budget=1.0)
        monkeypatch.setattr(store, "reader", busy)
        (result,) = engine.reprefill([request])
        assert isinstance(result.error, StoreUnavailable)
        engine.reprefill([request])[0].raise_for_error()


@pytest.mark.parametrize("system", ["contiguous-kv", "as-lru"])
def test_reads_that_are_late_for_the_engines_deadline_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    slow_reads(monkeypatch)
    with small_engine(tmp_path, system=system, model=TINY, read_deadline_s=1e-9) as engine:
        prefix = engine.ingest(tokens(300))
        request = Request(prefix=prefix, suffix=tokens(5, seed=2), budget=1.0)
        expected = engine.recompute(request)
        (result,) = engine.reprefill([request])
        assert engine.stats().read_errors > 0
        assert scale_error(result.logits, expected.logits) < 1e-4


def test_what_fills_a_models_context_fits_it(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, system="contiguous-kv") as engine:
        engine._placement.check_context(64, 1980, 4)
        with pytest.raises(ContextOverflow, match="64 prefix and 1980 suffix tokens and 5 new"):
            engine._placement.check_context(64, 1980, 5)
