"""Budgets that follow the question: the threshold's promise, and the engine that keeps it."""

from __future__ import annotations

import errno
import fcntl
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from engine_tiny import tiny_engine

from ckv_jax import Engine, Request, SamplingParams, fidelity
from ckv_jax.answer import Answer
from ckv_jax.fidelity import BUDGETS, Calibration, NotCalibrated, fidelity_of, gap


def calibration(gaps: Any, errors: Any, moves: Any, same: Any) -> Calibration:
    """Of tables [questions, budgets]."""
    tables = {"gaps": gaps, "errors": errors, "moves": moves, "same": same}
    rows = {name: fidelity._tuples(np.asarray(table)) for name, table in tables.items()}
    return Calibration(budgets=BUDGETS, **rows)


def drawn(rng: np.random.Generator, count: int, scale: float) -> Calibration:
    """Questions whose gap at a budget is the exact one with an error that falls with the budget."""
    exact = rng.exponential(2.0, count)[:, None]
    errors = rng.normal(size=(count, len(BUDGETS))) * scale * np.array([1.0, 0.7, 0.4, 0.2])
    moved = exact + errors
    still = np.zeros((count, len(BUDGETS)))
    return calibration(np.abs(moved), np.abs(moved) - exact, still, moved > 0)


def settled(known: Calibration, threshold: float) -> tuple[float, float]:
    """(share of equal first tokens, mean budget) of questions under a threshold."""
    same, spent = [], []
    for gaps, right in zip(known.gaps, known.same, strict=True):
        ready = np.asarray(gaps) >= threshold * known._fits[:, 0]
        first = int(ready.argmax()) if ready.any() else len(BUDGETS)
        same.append(first == len(BUDGETS) or right[first])
        spent.append((*BUDGETS, 1.0)[first])
    return float(np.mean(same)), float(np.mean(spent))


@pytest.mark.parametrize("wanted", [0.9, 0.98])
def test_new_questions_agree_as_often_as_promised(wanted: float) -> None:
    """In nine of ten calibrations."""
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(60):
        threshold = drawn(rng, 150, 0.8).threshold(wanted)
        assert math.isfinite(threshold)
        outcomes.append(settled(drawn(rng, 1000, 0.8), threshold))
    agree, spent = np.array(outcomes).T
    assert np.mean(agree < wanted) <= 0.17  # 0.1, as 60 calibrations show it
    assert spent.mean() < 0.6  # and is no promise by reading everything


def test_too_few_questions_promise_nothing() -> None:
    rng = np.random.default_rng(2)
    assert drawn(rng, 114, 0.0).threshold(0.98) < math.inf  # 0.98 ** 114 is below 0.1
    assert drawn(rng, 113, 0.0).threshold(0.98) == math.inf
    assert drawn(rng, 10, 0.0).threshold(1e-17) < math.inf  # 1 - 1e-17 is 1


def test_one_wrong_answer_that_a_larger_threshold_brings_back_counts() -> None:
    """The risk must not rise with the threshold: a question is right at 5%, wrong at 10%."""
    rows = 300
    gaps, same = np.full((rows, 4), 9.0), np.ones((rows, 4), bool)
    gaps[0], same[0] = (5.0, 6.0, 9.0, 9.0), (True, False, True, True)
    known = calibration(gaps, np.ones((rows, 4)), np.zeros((rows, 4)), same)
    assert known.threshold(0.99) > 6.0  # none of 300 may be wrong


def test_a_gap_that_has_moved_far_must_be_larger() -> None:
    """Errors that are twice what a gap has moved since the budget before."""
    moves = np.random.default_rng(4).exponential(1.0, (400, 4))
    moves[:, 0] = 0.0
    errors = np.where(moves > 0, 2 * moves, 1.0)
    known = calibration(np.full((400, 4), 9.0), errors, moves, np.ones((400, 4), bool))
    logits, still, away = np.array([0.0, 3.0]), np.array([1.0, 4.0]), np.array([2.0, 3.0])
    assert known.settles(logits, None, 0.05, 2.9) and not known.settles(logits, None, 0.05, 3.1)
    assert known.settles(logits, still, 0.1, 100.0)
    assert known.settles(logits, away, 0.1, 0.7) and not known.settles(logits, away, 0.1, 0.8)


@pytest.mark.parametrize("wrong", [0, 1, -0.5, 1.5, math.nan])
def test_a_fidelity_is_a_probability(wrong: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        drawn(np.random.default_rng(3), 10, 0.1).threshold(wrong)


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [("auto", 0.98), ("fidelity:0.95", 0.95), ("fidelity:.9", 0.9), (0.25, None), (None, None),
     ("mass:0.95", None)],
)  # fmt: skip
def test_budgets_that_name_a_fidelity(budget: Any, wanted: float | None) -> None:
    assert fidelity_of(budget) == wanted


@pytest.mark.parametrize("budget", ["fidelity:", "fidelity:0.0", "fidelity:." + "9" * 20])
def test_a_budget_with_no_probability_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match="expected fidelity:P"):
        fidelity_of(budget)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tiny_engine(tmp_path / "store") as made:
        yield made


def test_an_engine_learns_once_and_asks_by_it(engine: Engine) -> None:
    tokens = np.random.default_rng(0).integers(3, 120, 700)
    prefix = engine.ingest(tokens)
    with pytest.raises(NotCalibrated, match="ckv calibrate"):
        fidelity.budget_for(engine, prefix, [5, 6, 7], 0.9)
    done: list[tuple[int, int]] = []
    known = engine.calibrate(prefix, questions=60, progress=lambda *at: done.append(at))
    assert done[-1] == (300, 300) and len(known.gaps) == 60
    gaps, moves = np.asarray(known.gaps), np.asarray(known.moves)
    assert not moves[:, 0].any() and (moves[:, 1:] > 0).all()
    same_two = np.isclose(moves[:, 1:], np.abs(np.diff(gaps)))  # where those tokens stay in front
    assert same_two.mean() > 0.3
    assert fidelity.load(engine) == known
    assert fidelity.budget_for(engine, prefix, [5, 6, 7], 0.999).budget == 1.0  # 60 are too few


@pytest.mark.parametrize("needed", [0.05, 0.25, 1.0])
def test_a_question_takes_the_first_budget_whose_gap_is_large_enough(
    engine: Engine, needed: float
) -> None:
    """A calibration in which gaps have errors at all budgets below the one that is to be taken."""
    tokens = np.random.default_rng(0).integers(3, 120, 700)
    prefix, suffix = engine.ingest(tokens), tokens[300:324].tolist()
    asked = [Request(prefix=prefix, suffix=suffix, budget=budget) for budget in BUDGETS]
    gaps = [gap(result.logits) for result in engine.reprefill(asked)]
    errors = np.tile([1e-3 if budget >= needed else 1e3 for budget in BUDGETS], (99, 1))
    known = calibration(errors, errors, np.zeros((99, 4)), np.ones((99, 4), bool))
    fidelity._save(engine, known)  # its threshold is 1
    assert min(gaps) > 1e-3 and max(gaps) < 1e3
    found = fidelity.budget_for(engine, prefix, suffix, 0.95)
    assert found.budget == needed
    assert found.ms > 0
    one = engine.generate(Request(prefix=prefix, suffix=suffix), SamplingParams(max_tokens=1))
    answer = Answer.of(one.results()[0], tuple, before_ms=found.ms)
    assert answer.timings["first_token"] > found.ms


def test_a_calibration_is_saved_in_a_folder_without_locks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = drawn(np.random.default_rng(5), 10, 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
        fidelity._save(engine, known)
    assert fidelity.load(engine) == known


def test_the_largest_calibration_can_be_loaded(engine: Engine) -> None:
    known = drawn(np.random.default_rng(6), fidelity.MOST_QUESTIONS, 1e-4)
    fidelity._save(engine, known)
    assert fidelity.load(engine) == known
    prefix = engine.ingest(np.arange(600) % 100)
    for questions in (fidelity.MOST_QUESTIONS + 1, ["?"] * (fidelity.MOST_QUESTIONS + 1)):
        with pytest.raises(ValueError, match="expected at most 10,000"):
            engine.calibrate(prefix, questions=questions)


def test_a_spoilt_calibration_counts_as_none(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    path = fidelity._path(engine)
    path.parent.mkdir(parents=True)
    for spoilt in ("", "[]", '{"budgets": [0.05]}', json.dumps({"budgets": [2], "gaps": [[1]],
                   "errors": [[1]], "moves": [[0]], "same": [[True]]})):  # fmt: skip
        path.write_text(spoilt)
        assert fidelity.load(engine) is None
    assert "cannot use the calibration" in caplog.text
