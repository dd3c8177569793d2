"""The windows of all rows of a decode batch, as the host has them: one array operation serves a
period of all rows and KV heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ckv_jax.cache.tiers import counted
from ckv_jax.cache.window import CLOSED, FREE
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.window import Kept, Window


class Moving(NamedTuple):
    """What choices of some rows have chosen, and what their windows lack of it."""

    place: np.ndarray
    """int [n]: whose, by its place in the batch."""
    choice: np.ndarray
    """int [n]: which of `Plan.choices`."""
    ids: np.ndarray
    """int32 [n, N]: chunks, -1 past a choice's end."""
    table: np.ndarray
    """int32 [n, N]: see `cache.window.Moves`."""
    misses: np.ndarray


Lacking = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(prefix, layer group, chunk) int [n] each of packs."""


class Windows:
    """Windows of rows by their places in a batch. What one of them keeps is a part of these arrays
    until it is resized or another batch takes it over. Engine thread only."""

    def __init__(
        self, windows: Mapping[int, Window], memory: Memory, plan: Plan, *,
        rows: int, count: int, slots: int,
    ) -> None:  # fmt: skip
        """`rows`: of the batch; `count`: chunks of a choice, and `slots` of a window, at most."""
        self.kept = Kept.nothing(rows, plan.choices, count=count, slots=slots)
        """[rows, choices, ...]"""
        self.held = all(window.held for window in windows.values())
        self._tiers = memory.tiers
        self._groups = plan.group_table
        chunks = max(window.resident.num_chunks for window in windows.values())
        self._first, self._stride = np.zeros((2, rows, chunks), np.int64)
        for place, window in windows.items():
            mine = Kept(*(part[place] for part in self.kept))
            mine.put(window.kept)
            window.kept = mine
            self._first[place, : window.resident.num_chunks] = window.resident.first_page
            self._stride[place, : window.resident.num_chunks] = window.resident.page_stride

    def state(self, choices: range) -> np.ndarray:
        """What the device knows of these choices' windows, int32 [3, rows * choices, W]: see
        `cache.window.Window`."""
        mine = slice(choices.start, choices.stop)
        parts = [part[:, mine].reshape(-1, part.shape[2]) for part in self.kept[1:]]
        return np.stack(parts) if self.held else np.full_like(parts, CLOSED)

    def found(self, moving: Moving) -> np.ndarray:
        """Packs int64 [3, rows] that are in device slots, in host memory, and not cached, of those
        that are chosen; what windows hold is in device slots."""
        lacks = moving.misses if self.held else moving.ids
        row, column = np.nonzero(lacks >= 0)
        place, choice = moving.place[row], moving.choice[row]
        pages, at = self._pages(place, choice, lacks[row, column])
        device, host = self._tiers.lookup(pages)
        where = np.where(device >= 0, 0, np.where(host >= 0, 1, 2))
        rows = len(self._first)
        counts = np.bincount(where * rows + place[at], minlength=3 * rows).reshape(3, rows)
        kept = (moving.ids >= 0).sum(axis=1) - (lacks >= 0).sum(axis=1)
        kept *= (self._groups[moving.choice] >= 0).sum(axis=1)
        np.add.at(counts[0], moving.place, kept)
        return counts

    def lacking(self, moving: Moving, which: np.ndarray) -> Lacking:
        """All packs that windows lack, each once. `which` int [rows]: the prefix of each row."""
        row, column = np.nonzero(moving.misses >= 0)
        place, choice = moving.place[row], moving.choice[row]
        groups, chunks = int(self._groups.max()) + 1, self._first.shape[1]
        at, of = np.nonzero(self._groups[choice] >= 0)
        group = which[place[at]] * groups + self._groups[choice[at], of]
        each = np.unique(group * chunks + moving.misses[row, column][at])
        group, chunk = np.divmod(each, chunks)
        return *np.divmod(group, groups), chunk

    def make_way(self, moving: Moving) -> None:
        """Lets go of what stands where misses are to go."""
        row, column = np.nonzero(moving.misses >= 0)
        place, choice = moving.place[row], moving.choice[row]
        slot = moving.table[row, column]
        gone = self.kept.chunk[place, choice, slot]
        stood = gone >= 0
        pages, _ = self._pages(place[stood], choice[stood], gone[stood])
        self._tiers.unpin(*counted(pages))
        self.kept.chunk[place, choice, slot] = FREE

    def move(self, moving: Moving, step: int) -> None:
        """The choices are complete: all their packs are in device slots."""
        kept, (row, column) = self.kept, np.nonzero(moving.ids >= 0)
        place, choice, slot = moving.place[row], moving.choice[row], moving.table[row, column]
        came = moving.misses[row, column] >= 0
        chunk = moving.ids[row, column]
        pages, _ = self._pages(place[came], choice[came], chunk[came])
        self._tiers.pin(*counted(pages))
        self.rechoose(moving)
        kept.chunk[place, choice, slot] = chunk
        kept.last[place, choice, slot] = step
        kept.uses[place, choice, slot] = np.where(came, 1, kept.uses[place, choice, slot] + 1)

    def rechoose(self, moving: Moving) -> None:
        """What rows attend to from now on; all of it where windows are not held."""
        size = moving.ids.shape[1]
        self.kept.ids[moving.place, moving.choice, :size] = moving.ids
        self.kept.ids[moving.place, moving.choice, size:] = -1

    def _pages(
        self, place: np.ndarray, choice: np.ndarray, chunk: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Page numbers of all packs of chunks [n] of choices [n], and which of the n each is of."""
        groups = self._groups[choice]
        at, column = np.nonzero(groups >= 0)
        place, chunk = place[at], chunk[at]
        return self._first[place, chunk] + groups[at, column] * self._stride[place, chunk], at
