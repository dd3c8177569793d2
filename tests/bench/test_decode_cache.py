"""Traces of decode's choices, replays that must agree, and the report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.decode_cache import KEEPS, Setting, by_width, missed, next_choice, run, show
from bench.decode_traces import CHOOSING, CHUNK, STEADY, Trace, Tracer
from bench.oracle import Oracle
from bench.tasks.suffixes import lengthened, retold, told
from ckv_jax.data import words
from ckv_jax.data.ledger import Ledger
from ckv_jax.data.reference import LEARNED, demo_ledger, reference_folder
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.weights import load_pretrained

TOKENS = 512
POOLED, BY_4, *_, MEANS = CHOOSING


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_pretrained(reference_folder(), dtype="float32")


@pytest.fixture(scope="module")
def page() -> Ledger:
    return demo_ledger(0, TOKENS, questions=10, asked=LEARNED)


@pytest.fixture(scope="module")
def tracer(model: Transformer, page: Ledger) -> Tracer:
    return Tracer(model, page.tokens)


def test_questions_and_their_answers_follow_each_other(page: Ledger) -> None:
    found = retold(page, 3, 24)
    assert found.tokens.shape == found.wanted.shape == (3, 24)
    dot = words.WORD_IDS["."]
    for row, wanted in zip(found.tokens, found.wanted, strict=True):
        asked = np.flatnonzero(wanted >= 0)
        assert len(asked) >= 3
        for at in asked[asked < 22]:
            assert row[at + 1] == wanted[at] and row[at + 2] == dot
            ends = [tuple(q[:n][-2:]) for q, n in zip(page.questions, page.lengths, strict=True)]
            assert tuple(row[at - 1 : at + 1]) in ends
    assert not np.array_equal(found.tokens[0], found.tokens[1])
    np.testing.assert_array_equal(retold(page, 3, 24).tokens, found.tokens)
    with pytest.raises(ValueError, match="got 10 questions, expected enough for 500"):
        retold(page, 1, 500)
    with pytest.raises(ValueError, match="suffixes of different lengths"):
        told(page)


def test_all_that_is_chosen_answers_as_everything_does(
    model: Transformer, page: Ledger, tracer: Tracer
) -> None:
    long = lengthened(page, 8)
    full = Oracle(model, long).full().logits.argmax(-1)
    for choosing in (POOLED, MEANS):
        trace = tracer.record(choosing, told(long), 1.0)
        assert trace.right == np.mean(full == long.answers)


@pytest.mark.parametrize("choosing", [POOLED, MEANS], ids=lambda c: c.name)
def test_the_best_chunks_that_are_not_steady_are_chosen(
    model: Transformer, page: Ledger, tracer: Tracer, choosing: object
) -> None:
    trace = tracer.record(choosing, retold(page, 9, 12), 1 / 16)
    rows = choosing.rows(model.config)
    assert trace.ids.shape == (12, 9, rows, 2) and rows == (4 if choosing is POOLED else 64)
    assert trace.scores.shape == (12, 9, rows, TOKENS // CHUNK)
    wanted = np.sort(np.argsort(-trace.scores, axis=-1, kind="stable")[..., :2], axis=-1)
    np.testing.assert_array_equal(trace.ids, wanted)
    steady = np.isinf(trace.scores).all((0, 1, 2))
    assert steady.sum() == 1 + STEADY[1] // CHUNK and steady[0] and steady[-4:].all()
    assert np.isfinite(trace.scores[..., 1:-4]).all()


def test_by_several_tokens_is_the_sum_of_theirs(page: Ledger, tracer: Tracer) -> None:
    """Where everything is attended, what is chosen changes no hidden state."""
    sequences = retold(page, 2, 10)
    one = tracer.record(POOLED, sequences, 1.0).scores[..., 1:-4]
    four = tracer.record(BY_4, sequences, 1.0).scores[..., 1:-4]
    for step in range(10):
        np.testing.assert_allclose(
            four[step], one[max(0, step - 3) : step + 1].sum(0), rtol=1e-4, atol=1e-5
        )


def drawn(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    scores = np.empty((50, 2, 3, 20), np.float32)
    now = rng.standard_normal(scores.shape[1:])
    for step in range(50):
        now = 0.9 * now + 0.4 * rng.standard_normal(now.shape)
        scores[step] = now
    ids = np.sort(np.argsort(-scores, axis=-1)[..., :3], axis=-1).astype(np.int32)
    return Trace(ids=ids, scores=scores, right=0.0)


def test_the_next_choice_of_every_chunk() -> None:
    ids = np.array([[0, 1], [1, 2], [0, 3]], np.int32).reshape(3, 1, 1, 2)
    inf = np.inf
    wanted = [[2, 1, 1, 2, inf], [2, inf, inf, 2, inf], [inf] * 5]
    np.testing.assert_array_equal(next_choice(ids, 5)[:, 0, 0], wanted)


def test_nobody_beats_who_knows_the_future() -> None:
    for seed in range(3):
        trace = drawn(seed)
        for width in (3, 6):
            found = {keep: missed(trace, np.full(3, width), keep).sum((0, 1)) for keep in KEEPS}
            for keep in KEEPS:
                assert (found["belady"] <= found[keep]).all()
                if width == 3:
                    np.testing.assert_array_equal(found[keep], found["lru"])
            if width > 3:
                assert found["belady"].sum() < found["lru"].sum()


def test_widths_share_what_even_ones_take(model: Transformer) -> None:
    """One row changes at every step, the others never: the one gets what they do not need."""
    traces = []
    for seed in (0, 1):
        trace = drawn(seed)
        trace.ids[:, :, 1:] = [4, 9, 15]
        traces.append(trace)
    found = by_width(traces, POOLED, model.config)
    assert found["slots"] == [18, 18] and found["times"] == [[4.0], [1.0], [1.0]]
    assert found["ci95"][0] <= found["ratio"] <= found["ci95"][1] < 1


def test_a_run_reports_rows_and_bars(model: Transformer) -> None:
    setting = Setting(
        documents=2, sequences=2, steps=20, tokens=TOKENS, budgets=(1 / 16,), choosing=(POOLED,)
    )
    result = run(model, setting)
    parts = result["parts"]
    assert [part["trace"] for part in parts] == ["fillers, then a question",
                                                 "questions and answers"]  # fmt: skip
    for part in parts:
        hits = {(row["keep"], row["times"]): row["hits"] for row in part["rows"]}
        assert hits["none", 0] == 0 < hits["any", 1] <= hits["lru", 2] <= hits["belady", 2]
        nbytes = {(row["keep"], row["times"]): row["bytes_per_token"] for row in part["rows"]}
        assert nbytes["none", 0] == 4 * 2 * POOLED.pack_bytes(model.config)
        share = nbytes["lookahead", 3] / nbytes["none", 0]
        assert share == pytest.approx(1 - hits["lookahead", 3])
    assert len(result["bars"]) == 2 * 4
    assert json.loads(json.dumps(result)) == result
    assert "MISSED" in show(result) or "met" in show(result)
