"""Texts put together: questions that nobody shares, paired differences, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench import parts
from bench.selection_study import interval, paired_interval


def test_a_paired_difference_is_told_apart_where_answers_agree() -> None:
    right = np.arange(60) < 45
    same, other = np.arange(60) < 40, np.arange(60) >= 20  # 40 right each
    alike, apart = paired_interval(right, same), paired_interval(right, other)
    assert alike["difference"] == apart["difference"] == pytest.approx(5 / 60)
    low, high = alike["ci95"]
    assert 0 < low < 5 / 60 < high
    assert apart["ci95"][0] < 0  # twenty-five answers differ one way, twenty the other
    assert paired_interval(same, right)["ci95"] == pytest.approx([-high, -low])


def test_where_no_answer_differs_the_interval_is_not_empty() -> None:
    low, high = paired_interval([True] * 48, [True] * 48)["ci95"]
    assert -low == high == pytest.approx(1 - interval(48, 48)[0])


def test_nobody_is_asked_what_another_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    made = parts.random_tokens

    def noted(engine: Any, count: int, *, seed: int) -> np.ndarray:
        tokens = made(engine, count, seed=seed)
        if count == parts.SUFFIX_TOKENS:
            asked.append(tuple(tokens.tolist()))
        return tokens

    monkeypatch.setattr(parts, "random_tokens", noted)
    rows = parts.ttft("tiny", 256, 4, 2, (), (0.25, 1.0))
    assert [(row["way"], row.get("budget"), row["questions"]) for row in rows] == [
        ("full", None, 2), ("plain", 0.25, 2), ("plain", 1.0, 2),
    ]  # fmt: skip
    assert len(asked) == len(set(asked)) == 3 * 3  # the first of each compiles


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--documents -1", "got -1, expected 0 or more"),
        ("--tokens 3", "one for each of 4 texts"),
        ("--skip-ttft --documents 0", "nothing to measure"),
        ("--budgets 0", "(0, 1]"),
    ],
)
def test_what_cannot_be_measured_is_told(
    given: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        parts.parsed(given.split())
    assert error.value.code == 2 and says in capsys.readouterr().err
    assert parts.QUESTIONS >= 9
