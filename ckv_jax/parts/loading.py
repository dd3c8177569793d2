"""Packs of several prefixes as rows of one buffer, keys rotated to their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ckv_jax.parts.calls import PartsCalls
from ckv_jax.parts.joined import Joined, Rows
from ckv_jax.parts.rotation import rotations
from ckv_jax.pipeline.layers import LayerKv, Layers
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.open_prefix import OpenPrefix, Source
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.prefetcher import PackReader
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace


class Unreadable(Exception):
    """The store could not give some chunks of a prefix: they are to be computed again."""

    def __init__(self, which: int, chunks: np.ndarray) -> None:
        super().__init__(f"chunks {chunks.tolist()} of prefix number {which}")
        self.which = which
        self.chunks = chunks


@dataclass(frozen=True, slots=True)
class _Part:
    """Packs of one prefix, of which none is computed again by itself: the tokens are, with all
    texts in sight. See `open_prefix.Source`."""

    which: int
    of: OpenPrefix
    kind: Literal["pack", "probe"] = "pack"

    @property
    def prefix(self) -> Prefix:
        """Whose they are."""
        return self.of.prefix

    @property
    def groups(self) -> int:
        """See `OpenPrefix`."""
        return self.of.groups

    @property
    def first_page(self) -> np.ndarray:
        """See `OpenPrefix`."""
        return self.of.first_page

    @property
    def page_stride(self) -> np.ndarray:
        """See `OpenPrefix`."""
        return self.of.page_stride

    @property
    def reader(self) -> PackReader:
        """Reads them."""
        return self.of.reader

    @property
    def recovered(self) -> _Part:
        """Nothing takes their place."""
        return self

    def read_bytes(self, chunks: np.ndarray) -> int:
        """See `OpenPrefix`."""
        return self.of.read_bytes(chunks)

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        """See `open_prefix.Replacement`."""
        raise Unreadable(self.which, chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The prefixes that a text is put together of, open."""

    joined: Joined
    which: tuple[int, ...]
    """For each part, its prefix among those below: a prefix may come several times."""
    prefixes: Sequence[OpenPrefix]
    probes: Sequence[Digest]

    @property
    def sources(self) -> list[Source]:
        """Where packs of each prefix come from."""
        return [_Part(which, opened) for which, opened in enumerate(self.prefixes)]

    def chunks_of(self, which: int, chunks: np.ndarray) -> np.ndarray:
        """Chunks of one prefix, by its own numbers, among `chunks` of the text: ascending."""
        parts = [part for part, mine in enumerate(self.which) if mine == which]
        mine = chunks[np.isin(self.joined.part[chunks], parts)]
        return np.unique(self.joined.chunk[mine])

    def everywhere(self, error: Unreadable) -> np.ndarray:
        """The chunks of the text that could not be read."""
        joined = self.joined
        parts = [part for part, mine in enumerate(self.which) if mine == error.which]
        there = np.isin(joined.part, parts) & np.isin(joined.chunk, error.chunks)
        return np.flatnonzero(there)


class Loading:
    """Reads periods of one engine. Engine thread only; holds no slot of the pool between calls."""

    def __init__(
        self,
        layers: Layers,
        memory: Memory,
        plan: Plan,
        *,
        open_packs: Callable[[Sequence[Source], Trace], Packs],
        make_way: Callable[[int], None],
    ) -> None:
        """`open_packs`: the packs of some prefixes; `make_way(slots)`: others give back what they
        could do without."""
        self.calls = PartsCalls(layers)
        self._config = layers.config
        self._memory = memory
        self._plan = plan
        self._open = open_packs
        self._make_way = make_way

    def load(
        self, opened: Opened, period: int, rows: Rows, chunks: np.ndarray, capacity: int,
        trace: Trace,
    ) -> list[LayerKv]:  # fmt: skip
        """Buffers of `capacity` rows for each step of a period, `chunks` of them in their `rows`.

        Reads all that there is room for at once, the rest in portions. Raises `Unreadable`.
        """
        steps, groups = self._plan.period_steps(period), self._plan.groups(period)
        with trace.span("dispatch", lane="host"):
            buffers = [self.calls.buffers(step.layers, capacity) for step in steps]
        if not len(chunks):
            return buffers
        joined, size = opened.joined, len(rows)
        tables = rotations(self._config, joined.offsets.tolist())
        part, within = np.zeros((2, capacity), np.int32)
        part[:size], within[:size] = joined.part[rows.chunk], rows.within
        self._make_way(len(chunks) * len(groups))
        room = self._memory.step_slots
        at_once = len(chunks) * len(groups) <= room
        with self._open(opened.sources, trace) as packs:
            with trace.span("submit", lane="host", period=period):
                for step in steps if at_once else ():
                    for which, group, own in _wanted(opened, step, chunks):
                        packs.demand(which, group, own)
            for index, step in enumerate(steps):
                portion = len(chunks) if at_once else max(1, room // len(step.groups))
                for first in range(0, len(chunks), portion):
                    now = chunks[first : first + portion]
                    slots = np.full((len(step.groups), capacity), -1, np.int32)
                    slots[:, :size] = self._slots(packs, opened, step, now)[:, rows.chunk]
                    with trace.span("dispatch", lane="host"):
                        buffers[index] = self.calls.bring(
                            buffers[index], self._memory.pool.pages, slots, within, tables, part
                        )
                        for which, group, _ in _wanted(opened, step, now):
                            packs.give_up(which, group, buffers[index][0][0])
        return buffers

    def _slots(self, packs: Packs, opened: Opened, step: Step, chunks: np.ndarray) -> np.ndarray:
        """The slot int32 [P, M] of each chunk of the text in each of a step's layer groups; -1."""
        joined = opened.joined
        slots = np.full((len(step.groups), joined.num_chunks), -1, np.int32)
        wanted = _wanted(opened, step, chunks)
        for which, group, own in wanted:
            packs.demand(which, group, own)
        for which, group, own in wanted:
            slot_of = np.full(opened.prefixes[which].num_chunks, -1, np.int32)
            slot_of[own] = packs.collect(which, group, own)
            for part in (part for part, mine in enumerate(opened.which) if mine == which):
                mine = chunks[joined.part[chunks] == part]
                slots[group - step.groups.start, mine] = slot_of[joined.chunk[mine]]
        return slots


def _wanted(opened: Opened, step: Step, chunks: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """(prefix, layer group, its own chunks) of all packs of some chunks in a step."""
    own = [opened.chunks_of(which, chunks) for which in range(len(opened.prefixes))]
    return [
        (which, group, mine) for group in step.groups for which, mine in enumerate(own) if len(mine)
    ]
