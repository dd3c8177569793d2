"""The first period is read ahead where requests are alike, and there it pays."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_sharp import COLD, PERIOD, Sharp
from engine_support import tokens

from ckv_jax import Engine, Request
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

BUDGET = 0.2
SYSTEM = {"prefetch": "previous"}
"""Reads ahead what the period before selected: always the same, whatever the machine's pace."""


def ask(engine: Engine, prefix: Prefix, suffix: list[int]) -> Trace:
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=BUDGET)])
    result.raise_for_error()
    return result.trace


def covered(trace: Trace) -> int:
    """Demanded packs whose reads were under way: at most `CHOSEN` of the second period's, which
    has one layer, and all others of the first's."""
    assert trace.counters["demanded"] == (PERIOD + 1) * CHOSEN
    return trace.counters["covered"]


CHOSEN = 4
"""Of 16 chunks, at this budget."""


@pytest.mark.parametrize("suffix", [[1, 2, 3], [9]])
def test_a_question_asked_again_finds_its_first_period_under_way(
    sharp: Sharp, tmp_path: Path, suffix: list[int]
) -> None:
    with sharp.fresh(tmp_path, system=SYSTEM, **COLD) as engine:
        prefix = engine.ingest(tokens(250))
        first, second, third, fourth = (ask(engine, prefix, suffix) for _ in range(4))
        same = engine.last_selection(prefix)
    assert all(len(chosen) == CHOSEN for chosen in same)
    # Once is no recurrence; the second request finds that the first one's selection came again.
    assert covered(first) == covered(second) <= CHOSEN
    for trace in (third, fourth):
        assert covered(trace) == covered(first) + PERIOD * CHOSEN
        assert trace.bytes["unused"] == second.bytes["unused"]  # all of it was used
        assert trace.bytes["ssd"] == second.bytes["ssd"]


def test_what_does_not_come_again_is_not_read_ahead(sharp: Sharp, tmp_path: Path) -> None:
    with sharp.fresh(tmp_path, system=SYSTEM, **COLD) as engine:
        prefix = engine.ingest(tokens(250))
        questions = [tokens(3, seed).tolist() for seed in range(60, 90)]
        chosen = []
        for question in questions:
            ask(engine, prefix, question)
            chosen.append(set(engine.last_selection(prefix)[0].tolist()))
        pairs = [(a, b) for a in range(30) for b in range(30) if not chosen[a] & chosen[b]]
        assert pairs, "every two questions share a chunk"
        a, b = pairs[0]
        ask(engine, prefix, questions[a])
        ask(engine, prefix, questions[b])  # nothing recurred: from now on nothing is expected
        for which in (a, b, a):
            trace = ask(engine, prefix, questions[which])
            assert covered(trace) <= CHOSEN
