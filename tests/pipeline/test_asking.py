"""Which prefixes are asked in one call, and whose row of its outcome is whose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ckv_jax.pipeline.asking import Asking, Call, in_calls
from ckv_jax.pipeline.choice_calls import Chosen
from ckv_jax.pipeline.outcome import Outcome, chunks_of
from ckv_jax.selection.base import Selection

PARTS = 2
"""Choices of a row."""
CHUNKS = 9


def prefix(which: int, rows: int = 1, shapes: str = "alike", stages: object = None) -> Any:
    of = SimpleNamespace(shapes=shapes)
    on = SimpleNamespace(rows=np.zeros(rows))
    return SimpleNamespace(which=which, on=on, stages=stages, of=of)


def asked_together(*asking: Any) -> list[list[int]]:
    return [[one.which for one in call] for call in in_calls(asking)]


def test_prefixes_of_one_row_each_ask_together_where_they_are_alike() -> None:
    others = prefix(1, shapes="other"), prefix(3, stages="two")
    alike = prefix(0), prefix(2), prefix(4)
    assert asked_together(alike[0], others[0], alike[1], others[1], alike[2]) == [
        [0, 2, 4], [1], [3]
    ]  # fmt: skip


def test_a_prefix_with_several_rows_asks_alone() -> None:
    assert asked_together(prefix(0), prefix(1, rows=2), prefix(2, rows=2), prefix(3)) == [
        [0, 3], [1], [2]
    ]  # fmt: skip


def test_no_more_than_sixteen_prefixes_ask_in_a_call() -> None:
    calls = asked_together(*(prefix(which) for which in range(35)))
    assert calls == [[*range(16)], [*range(16, 32)], [*range(32, 35)]]


def chosen(ids: np.ndarray, near: np.ndarray) -> Chosen:
    """That so many rows chose these and nearly chose those."""
    rows: Any = np.arange(len(ids), dtype=np.float32)
    scores = np.repeat(rows[:, None], CHUNKS, axis=1)
    nothing: Any = None
    return Chosen(
        selection=Selection(ids, ids + 0.5, rows, scores),
        near=near,  # type: ignore[arg-type]
        moves=SimpleNamespace(table=ids + 10, misses=ids + 20),  # type: ignore[arg-type]
        own=scores,
        window=nothing,
    )


def rows_of_a_call() -> tuple[Call, list[Asking]]:
    """Two prefixes of one row each; the first one's second row is padding."""
    choosers = [SimpleNamespace(window=f"window {row}") for row in range(2)]
    on: list[Any] = [
        SimpleNamespace(choosers=choosers[:1], rows=np.array([3, 0]), limits=np.array([2, 0])),
        SimpleNamespace(choosers=choosers[1:], rows=np.array([2]), limits=np.array([1])),
    ]
    asking = [
        Asking(0, on[0], np.array([7, 8]), PARTS),
        Asking(1, on[1], np.array([9]), PARTS),
    ]
    ids = np.array([[0, 4], [1, 5], [-1, -1], [-1, -1], [6, -1], [3, -1]])
    near = np.array([[5, -1], [4, 8], [-1, -1], [-1, -1], [7, -1], [-1, -1]])
    return Call(chosen(ids, near), asking), asking


def test_each_prefix_has_its_own_rows_of_a_call() -> None:
    call, (first, second) = rows_of_a_call()
    assert (first.call, first.first, second.call, second.first) == (call, 0, call, 4)
    assert first.outcome.ids.tolist() == call.outcome.ids[:4].tolist()
    assert second.outcome.ids.tolist() == [[6, -1], [3, -1]]
    assert second.outcome.selection.mass.tolist() == [4.0, 5.0]
    assert second.outcome is second.outcome  # made once
    who = [(one.window, rows, tokens) for one, rows, tokens in first.choosing()]
    assert who == [("window 0", slice(0, 2), 7)]  # the other is padding
    assert second.window == "window 1"


def test_a_row_has_the_rows_of_the_outcome_at_its_place() -> None:
    on: Any = SimpleNamespace(choosers=["a", "b", "c"])
    asking = Asking(0, on, np.array([7, 8, 9, 7]), PARTS)
    assert [*asking.choosing()] == [
        ("a", slice(0, 2), 7), ("b", slice(2, 4), 8), ("c", slice(4, 6), 9)
    ]  # fmt: skip


def test_windows_move_by_the_rows_that_chose() -> None:
    call, _ = rows_of_a_call()
    moving = call.moving(range(4, 4 + PARTS))
    assert moving.place.tolist() == [3, 3, 2, 2]
    assert moving.choice.tolist() == [4, 5, 4, 5]
    assert moving.ids.tolist() == [[0, 4], [1, 5], [6, -1], [3, -1]]
    assert moving.table.tolist() == (moving.ids + 10).tolist()
    assert moving.misses.tolist() == (moving.ids + 20).tolist()


def test_near_misses_are_nobodys_choice() -> None:
    near = np.array([[0, 8, 3], [5, -1, -1]])
    rows = Outcome.of(chosen(np.array([[3, 1], [0, -1]]), near))
    assert rows.near_misses().tolist() == [5, 8]
    assert rows.part(1, 2).near_misses().tolist() == [5]


def test_chunks_are_named_once_and_in_order() -> None:
    assert chunks_of([np.array([[4, 0], [-1, 4]]), np.array([2])]).tolist() == [0, 2, 4]
    assert chunks_of([]).tolist() == []
