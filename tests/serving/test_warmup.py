"""Warm-up: nothing is compiled after it, whatever the store cannot give."""

from __future__ import annotations

from pathlib import Path

import pytest
from compilations import compilations
from engine_support import TIGHT, scale_error, tokens
from engine_tiny import tiny_engine
from pipeline_support import UnsteadyStore

from ckv_jax import Request, SamplingParams


@pytest.mark.parametrize(
    ("system", "failing"),
    [("ckv", 0.3), pytest.param("contiguous-kv", 1.0, marks=pytest.mark.slow)],
)
def test_what_cannot_be_read_is_recomputed(tmp_path: Path, system: str, failing: float) -> None:
    with tiny_engine(tmp_path, system=system, nothing_compiled=True) as plain:
        prefix = plain.ingest(tokens(200))
        asked = Request(prefix=prefix, suffix=[1, 2, 3], budget=1.0)
        expected = plain.recompute(asked)
        unsteady = UnsteadyStore(plain.store, failing)
        with plain.variant(plain.config, store=unsteady) as engine:
            engine.warmup(prefix, max_suffix=4, budgets=[1.0], max_tokens=4)
            warm = compilations()
            (result,) = engine.reprefill([asked])
            sampling = SamplingParams(max_tokens=4)
            (text,) = engine.generate(asked, sampling).results()
            (kept,) = engine.generate(asked, sampling, keep_kv=True).results()
            assert compilations() == warm
        assert scale_error(result.logits, expected.logits) < TIGHT
        assert text.completion().token_ids[0] == expected.logits.argmax()
        kv = kept.completion().kv
        assert kv is not None and kv.shape[2] == len(asked.suffix) + 4  # the last token's, too


@pytest.mark.slow
def test_requests_within_the_bounds_compile_nothing(tmp_path: Path) -> None:
    """Batches that are no power of two, over one prefix and over several, whose rows leave at their
    first token, many at once, or late, so that buffers grow more than once."""
    with tiny_engine(tmp_path, system="ckv", max_batch=3, nothing_compiled=True) as engine:
        prefixes = [engine.ingest(tokens(200, seed)) for seed in range(3)]
        budgets = (0.25, "mass:0.9:0.1-0.3")
        engine.warmup(prefixes[0], max_batch=3, max_suffix=20, budgets=budgets, max_tokens=140)
        warm = compilations()
        for which, suffix, budget in (
            ((0,), 3, 0.25), ((0, 0, 0), 20, 0.25), ((0, 1), 3, budgets[1]), ((2, 1, 0), 16, 0.25),
        ):  # fmt: skip
            asked = [
                Request(prefix=prefixes[i], suffix=tokens(suffix).tolist(), budget=budget)
                for i in which
            ]
            for result in engine.reprefill(asked):
                result.raise_for_error()
            assert compilations() == warm, (which, suffix)
        for which, lengths in (
            ((0, 0), (1, 3)), ((0, 0, 0), (3, 3, 140)), ((0, 1, 1), (1, 1, 3)), ((2, 1), (140, 3)),
        ):  # fmt: skip
            asked = [Request(prefix=prefixes[i], suffix=[1, 2, 3], budget=0.25) for i in which]
            sampling = [SamplingParams(max_tokens=n) for n in lengths]
            for one in engine.generate(asked, sampling).results():
                one.raise_for_error()
            assert compilations() == warm, (which, lengths)


@pytest.mark.slow
def test_questions_over_what_was_stored_compile_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once nothing else is done: one and two at once, short and long, sparse and exact, over the
    prefix, one of about its length, and a turn after it. A prefix that goes before is no fault."""
    with tiny_engine(tmp_path, system="ckv", warm_batch=2, nothing_compiled=True) as engine:
        assert engine.store.delete(engine.ingest(tokens(300, seed=2)))
        engine.settle()
        prefix = engine.ingest(tokens(300))
        question = Request(prefix=prefix, suffix=[1, 2, 3])
        engine.reprefill([question])
        busy = compilations()
        for _ in range(50):  # one after the other: the engine is never quiet
            engine.reprefill([question])
        assert compilations() == busy
        engine.settle()
        warm = compilations()
        assert warm > busy
        other = engine.ingest(tokens(301, seed=1))
        sampling = SamplingParams(max_tokens=20, temperature=0.5)
        for asked, length, budget, count in (
            (prefix, 3, None, 1), (prefix, 40, 1.0, 1), (prefix, 64, None, 2), (other, 16, 1.0, 2),
            (other, 20, 0.1, 2), (prefix, 5, 0.37, 1), (other, 5, "mass:0.8:0.1-0.6", 2),
        ):  # fmt: skip
            request = Request(prefix=asked, suffix=[1] * length, budget=budget)
            texts = engine.generate([request] * count, sampling).results()
            assert all(text.error is None for text in texts)
            assert compilations() == warm, (length, budget, count)
        (turn,) = engine.generate(  # as many chunks as before
            Request(prefix=prefix, suffix=[4], budget=1.0),
            SamplingParams(max_tokens=3),
            keep_kv=True,
        ).results()
        request = Request(prefix=engine.append(turn), suffix=[5, 6], budget=1.0)
        assert engine.generate(request, sampling).results()[0].error is None
        engine.settle()
        assert compilations() == warm
    assert not caplog.records


def test_an_engine_is_closed_before_what_is_stored_is_compiled_for(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, system="ckv", warm_batch=1, nothing_compiled=True)
    engine.ingest(tokens(300))
    engine.close()
    engine.settle()
