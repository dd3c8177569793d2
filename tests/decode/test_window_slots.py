"""What a window pins, keeps and lets go of, by the numbers: no device has any of it.

Three layers in two periods: a choice of the first is of two packs a chunk, one of the second of
one.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckv_jax.decode.eviction import CLOSED, FREE
from ckv_jax.decode.window import BatchWindows, Window
from ckv_jax.pipeline.plan import Plan
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.policy import POLICIES
from ckv_jax.prefix.tiers import Tiers
from ckv_jax.systems import SYSTEMS

PLAN = Plan.of(3, dataclasses.replace(SYSTEMS["ckv"], period=2, subperiod=1, pack_layers=1))
GROUPS, CHUNKS = 3, 6


class Rows:
    """A prefix of six chunks, of which the first four are on the device, the fifth in host memory
    and the last nowhere; and rows that stand on it."""

    def __init__(self) -> None:
        self.tiers = Tiers(60, 60, 0, POLICIES["lru"])
        first = self.tiers.register(GROUPS * CHUNKS)
        self.opened = OpenPrefix(
            prefix=None,  # type: ignore[arg-type]
            first_page=first + np.arange(CHUNKS),
            page_stride=np.full(CHUNKS, CHUNKS),
            chunk_lengths=np.array([16] * 5 + [9], np.int32),
            life=None,  # type: ignore[arg-type]
        )
        pages = self.pages(range(4), range(GROUPS))
        self.tiers.own(pages, self.tiers.take(len(pages)))
        self.memory: Any = SimpleNamespace(tiers=self.tiers, trim=lambda: None)
        hosted = self.pages([4], range(GROUPS))
        self.tiers._table.host_slot[hosted] = np.arange(len(hosted))

    def pages(self, chunks: Any, groups: Any) -> np.ndarray:
        return np.concatenate([self.opened.pages(group, np.array(chunks)) for group in groups])

    def window(self, *choices: list[int], held: bool = True) -> Window:
        made = Window(self.opened, self.memory, PLAN, held=held)
        for choice, ids in enumerate(choices):
            made.choose(choice, np.array(ids))
        return made

    def pinned(self) -> dict[int, list[int]]:
        """How often each chunk is pinned in each layer group, where it is."""
        pins = self.tiers._table.pins[self.pages(range(CHUNKS), range(GROUPS))]
        by_group = pins.reshape(GROUPS, CHUNKS).T
        return {chunk: some.tolist() for chunk, some in enumerate(by_group) if some.any()}


def test_who_holds_nothing_knows_what_was_chosen_and_pins_none() -> None:
    rows = Rows()
    window = rows.window([0, 5], [1], held=False)
    assert rows.pinned() == {} and window.excess == 0
    assert window.lengths(0).tolist() == [16, 9]
    window.resize(np.array([4, 4]))
    assert window.kept.open.tolist() == [2, 1]


def test_what_a_row_says_is_added_to_what_it_attends_to() -> None:
    rows = Rows()
    window = rows.window([0, 2], [1])
    window.add(0, np.array([1, 3]))
    assert window.ids(0).tolist() == [0, 1, 2, 3] and window.ids(1).tolist() == [1]
    assert rows.pinned()[3] == [1, 1, 0]
    assert window.kept.chunk.tolist() == [[0, 1, 2, 3], [1, CLOSED, CLOSED, CLOSED]]
    assert window.kept.last.tolist() == [[0] * 4, [0, -1, -1, -1]]
    assert window.kept.uses.tolist() == [[1] * 4, [1, 0, 0, 0]]


def test_a_window_that_narrows_keeps_its_choice_and_then_what_was_chosen_last() -> None:
    rows = Rows()
    window = rows.window([0, 2], [1])
    window.resize(np.array([4, 1]))
    assert window.kept.chunk.tolist() == [[2, 0, FREE, FREE], [1, CLOSED, CLOSED, CLOSED]]
    window._pin(np.zeros(2, int), np.array([1, 3]))
    window.kept.chunk[0], window.kept.last[0] = [3, 2, 1, 0], [8, 1, 9, 1]  # 2 and 0 are chosen
    assert window.excess == 4
    window.resize(np.array([3, 1]))
    assert sorted(window.kept.chunk[0].tolist()) == [0, 1, 2]  # 3 was chosen before 1
    window.resize(np.array([1, 0]))
    assert sorted(window.kept.chunk[0].tolist()) == [0, 2]
    assert window.kept.chunk[1].tolist() == [1, CLOSED]
    assert rows.pinned() == {0: [1, 1, 0], 1: [0, 0, 1], 2: [1, 1, 0]}


def test_a_prefix_that_goes_on_takes_what_lies_elsewhere_from_the_window() -> None:
    """Its last chunk was partial and is stored anew, at an earlier place than it was."""
    rows = Rows()
    short = dataclasses.replace(
        rows.opened, first_page=rows.opened.first_page[:4].copy(),
        page_stride=rows.opened.page_stride[:4], chunk_lengths=rows.opened.chunk_lengths[:4],
    )  # fmt: skip
    for moved in (rows.opened.first_page[5], rows.opened.first_page[0]):
        window = Window(short, rows.memory, PLAN, held=True)
        window.choose(0, np.array([1, 3]))
        window.choose(1, np.array([2]))
        longer = dataclasses.replace(rows.opened, first_page=rows.opened.first_page.copy())
        longer.first_page[3] = moved
        assert window.absent(longer).tolist() == [3, 4, 5]
        window.onto(longer)
        assert window.opened is longer
        assert window.ids(0).tolist() == [1] and window.ids(1).tolist() == [2]
        assert window.kept.chunk.tolist() == [[1, FREE], [2, CLOSED]]
        assert rows.pinned() == {1: [1, 1, 0], 2: [0, 0, 1]}
        window.close()


def of_batch(rows: Rows, *windows: Window) -> BatchWindows:
    return BatchWindows(
        dict(enumerate(windows)), rows.memory, PLAN, rows=2, count=3, slots=4
    )  # fmt: skip


def at(*numbers: int) -> np.ndarray:
    return np.array(numbers)


def test_what_leaves_a_slot_is_unpinned_and_a_free_slot_stays_free() -> None:
    rows = Rows()
    window, other = rows.window([0, 1], [2]), rows.window([0], [1])
    window.resize(np.array([3, 1]))
    windows = of_batch(rows, window, other)
    slot = window.kept.chunk[0].tolist().index(1)
    free = window.kept.chunk[0].tolist().index(FREE)
    windows.evict(at(0, 0), at(0, 0), at(slot, free))
    assert window.kept.chunk[0, slot] == FREE and 1 not in window.kept.chunk[0].tolist()
    assert rows.pinned() == {0: [2, 2, 0], 1: [0, 0, 1], 2: [0, 0, 1]}
    state = windows.state(range(1))
    assert state.shape == (3, 2, 4) and state[0, 0].tolist() == window.kept.chunk[0].tolist()
    assert state[0, 1].tolist() == [0, CLOSED, CLOSED, CLOSED]


def test_slots_that_open_again_know_nothing_of_what_stood_there() -> None:
    rows = Rows()
    window = rows.window()
    wide, narrow = np.array([6, 6]), np.array([3, 6])
    window.resize(wide)
    window.kept.last[...], window.kept.uses[...] = 7, 2  # of chunks that have left
    kept = window.kept
    window.resize(wide)
    assert window.kept is kept  # nothing changes
    window.resize(narrow)
    assert window.kept.open.tolist() == narrow.tolist()
    window.resize(wide)
    assert (window.kept.chunk == FREE).all()
    assert window.kept.last.tolist() == [[7, 7, 7, -1, -1, -1], [7] * 6]
    assert window.kept.uses.tolist() == [[2, 2, 2, 0, 0, 0], [2] * 6]
