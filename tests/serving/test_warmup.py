"""Warm-up over a store that cannot give what it holds."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compilations import compilations
from engine_support import TIGHT, scale_error, tokens
from engine_tiny import tiny_engine
from pipeline_support import UnsteadyStore

from ckv_jax import Prefix, Request, SamplingParams
from ckv_jax.buckets import bucket
from ckv_jax.budget import Budget
from ckv_jax.config import OwnParts
from ckv_jax.prefix.memory import job_packs
from ckv_jax.serving import warmup
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.text import Text
from ckv_jax.trace import Trace
from tests.support.truth import FINGERPRINT
from tests.support.truth import SMALL as LAYOUT


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


# -- what is run ----------------------------------------------------------------------------------

PREFIX = Prefix.empty(FINGERPRINT, LAYOUT, "")


class Notes:
    """A worker that writes down what it is asked for, and answers nothing."""

    def __init__(self, *, chunked: bool = True, decode: object = None) -> None:
        self.batches: list[list[Sequence]] = []
        self.texts: list[tuple[int, int]] = []
        self.packs: list[int] = []
        pool = SimpleNamespace(warm=lambda packs, chunks: self.packs.extend(packs))
        self.memory = SimpleNamespace(pool=pool)
        self.landing = SimpleNamespace(warm=lambda: None)
        self.system = SimpleNamespace(chunked=chunked, decode=decode, own=OwnParts())
        self.executor = SimpleNamespace(warm=lambda tokens: None)

    def first_tokens(self, batch: Several[Sequence]) -> None:
        self.batches.append(list(batch))
        for sequence in batch:
            sequence.fail(ValueError("nothing is computed"))

    def warm(self, texts: Several[Sequence], tokens: int, suffix: int) -> None:
        assert self.batches[-1] == list(texts)
        self.texts.append((tokens, suffix))


def lengths(batch: Several[Sequence]) -> list[int]:
    return [one.sampling.max_tokens if one.sampling else 0 for one in batch]


@pytest.mark.parametrize(("chunked", "budgets"), [(True, [0.19]), (False, [0.2, 0.19])])
def test_every_size_of_a_batch_and_a_suffix_meets_every_count_that_is_selected(
    chunked: bool, budgets: list[float]
) -> None:
    """A fifth of ten chunks is as many as 0.19 of them, but more tokens."""
    worker: Any = Notes(chunked=chunked)
    prefix = replace(PREFIX, tokens=np.zeros(150, np.int32))
    for _ in warmup.warm(
        worker, prefix, max_batch=3, max_suffix=20, budgets=[0.2, 0.19], max_tokens=0
    ):
        pass
    asked = [(len(batch), len(batch[0].suffix), batch[0].budget) for batch in worker.batches]
    assert asked == [
        (batch, suffix, budget) for batch in (1, 2, 4) for suffix in (16, 20) for budget in budgets
    ]
    assert all(one.sampling is None for batch in worker.batches for one in batch)
    most = job_packs(LAYOUT)
    assert worker.packs == sorted({bucket(n) for n in (*range(1, most), most)})


def test_texts_are_run_at_every_size_of_their_buffers() -> None:
    for suffix, most, batch, sizes, leaving in (
        (64, 100, 2, [(128, 64), (256, 64)], [4, 3]),  # the first token, too, has a row
        (63, 64, 1, [(64, 64), (128, 64)], [3]),
        (63, 65, 4, [(64, 64), (128, 64), (256, 64)], [5, 4, 3, 3]),
        (20, 0, 1, [(64, 32)], [3]),
    ):
        worker: Any = Notes()
        tokens = np.zeros(suffix, np.int32)
        for _ in warmup._warm_texts(worker, PREFIX, tokens, 0.5, batch, most):
            pass
        assert worker.texts == sizes
        assert [lengths(texts) for texts in worker.batches] == [leaving] * len(sizes)


def test_texts_that_choose_are_run_with_prefixes_of_their_own_and_in_common() -> None:
    """Each number of rows of each kind, up to a power of two; nobody shares by himself."""
    assert [warmup._apart(batch) for batch in (1, 2, 4, 8)] == [
        [], [2], [1, 2, 4], [1, 2, 4, 6, 8]
    ]  # fmt: skip
    worker: Any = Notes(decode=object())
    for _ in warmup._warm_texts(worker, PREFIX, np.zeros(3, np.int32), 0.5, 4, 1):
        pass
    assert worker.texts == [(64, 16)] * 4
    assert [sum(one.apart for one in batch) for batch in worker.batches] == [0, 1, 2, 4]
    assert [lengths(batch) for batch in worker.batches[1:]] == [[3] * 4] * 3


def test_one_budget_for_each_count_that_it_selects_or_may() -> None:
    assert warmup._distinct([0.25, 1.0, 0.26], 10) == [0.26, 1.0]
    mass = "mass:0.9:0.1-0.5"
    found = warmup._distinct([0.05, mass], 100)
    assert found[:2] == [0.05, mass]
    counts = [Budget.of(budget).chunks(100) for budget in found[2:]]
    assert counts == [10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 50]
    assert warmup._distinct(["mass:0.9:0.1-0.1"], 100) == ["mass:0.9:0.1-0.1", 0.1]


def test_no_token_ends_a_made_up_text_before_its_length() -> None:
    tokens = np.zeros(2, np.int32)
    text = warmup._MadeUp(PREFIX, tokens, 0.5, 3)
    assert text.keep_kv and not text.apart and text.sampling is not None
    text.begin_text(Text(None, text.sampling, [7]), Trace())
    reasons = []
    for token in (7, 5, 7):
        text.push(token)
        reasons.append(text.reason)
    assert reasons == [None, None, "stop"]
    first = warmup._MadeUp(PREFIX, tokens, 0.5)
    assert first.sampling is None and not first.keep_kv
