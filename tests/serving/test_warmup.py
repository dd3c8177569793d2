"""Warm-up over a store that cannot give what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from compilations import compilations
from engine_support import TIGHT, scale_error, tokens
from engine_tiny import tiny_engine
from pipeline_support import UnsteadyStore

from ckv_jax import Request, SamplingParams


@pytest.mark.parametrize(("system", "failing"), [("ckv", 0.3), ("contiguous-kv", 1.0)])
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


def test_texts_that_come_and_go_compile_nothing(tmp_path: Path) -> None:
    """Batches that are no power of two, that a text leaves at its first token, that many leave at
    once, and buffers that grow more than once."""
    with tiny_engine(tmp_path, system="ckv", max_batch=3, nothing_compiled=True) as engine:
        prefix = engine.ingest(tokens(200))
        engine.warmup(prefix, max_batch=3, max_suffix=4, budgets=[0.25], max_tokens=140)
        warm = compilations()
        asked = Request(prefix=prefix, suffix=[1, 2, 3], budget=0.25)
        for lengths in ((1, 3), (3, 3, 140), (1, 1, 3), (140, 3)):
            for text in engine.generate(
                [asked] * len(lengths), [SamplingParams(max_tokens=n) for n in lengths]
            ).results():
                text.raise_for_error()
            assert compilations() == warm, lengths
