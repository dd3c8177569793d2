"""Packs of several prefixes as rows of one buffer, keys rotated to their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ckv_jax.documents.calls import DocumentCalls
from ckv_jax.documents.joined import JoinedDocuments, JoinedRows, rotations
from ckv_jax.pipeline.layers import LayerKv
from ckv_jax.pipeline.plan import Step
from ckv_jax.pipeline.runtime import Runtime
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix, Source
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.prefetcher import PackReader
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace


class UnreadableChunks(Exception):
    """The store could not give some chunks of a prefix: they are to be computed again."""

    def __init__(self, which: int, chunks: np.ndarray) -> None:
        super().__init__(f"chunks {chunks.tolist()} of prefix number {which}")
        self.which = which
        self.chunks = chunks


@dataclass(frozen=True, slots=True)
class _DocumentPacks:
    """Packs of one prefix, of which none is computed again by itself: the tokens are, with all
    documents in sight. See `open_prefix.Source`."""

    which: int
    of: OpenPrefix
    kind: Literal["pack", "probe"] = "pack"

    @property
    def prefix(self) -> Prefix:
        """The stored prefix."""
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
    def recovered(self) -> _DocumentPacks:
        """Nothing takes their place."""
        return self

    def read_bytes(self, chunks: np.ndarray) -> int:
        """See `OpenPrefix`."""
        return self.of.read_bytes(chunks)

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        """See `open_prefix.Replacement`."""
        raise UnreadableChunks(self.which, chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDocuments:
    """The prefixes of the documents of one request, open."""

    joined: JoinedDocuments
    which: tuple[int, ...]
    """For each document, its prefix among those below: one may come several times."""
    prefixes: Sequence[OpenPrefix]
    probes: Sequence[Digest]

    @property
    def sources(self) -> list[Source]:
        """Where packs of each prefix come from."""
        return [_DocumentPacks(which, opened) for which, opened in enumerate(self.prefixes)]

    def chunks_of(self, which: int, chunks: np.ndarray) -> np.ndarray:
        """Chunks of one prefix, by its own numbers, among `chunks` of all: ascending."""
        same = [document for document, mine in enumerate(self.which) if mine == which]
        mine = chunks[np.isin(self.joined.document[chunks], same)]
        return np.unique(self.joined.chunk[mine])

    def everywhere(self, error: UnreadableChunks) -> np.ndarray:
        """The chunks that could not be read, by their numbers in `joined`."""
        joined = self.joined
        same = [document for document, mine in enumerate(self.which) if mine == error.which]
        there = np.isin(joined.document, same) & np.isin(joined.chunk, error.chunks)
        return np.flatnonzero(there)


class DocumentLoader:
    """Reads periods of one engine. Engine thread only; holds no slot of the pool between calls."""

    def __init__(self, runtime: Runtime, *, make_way: Callable[[int], None]) -> None:
        """`make_way(slots)`: running sequences give back what they could do without."""
        self.calls = DocumentCalls(runtime.layers)
        self.runtime = runtime
        self._make_way = make_way

    def load(
        self, opened: OpenDocuments, period: int, rows: JoinedRows, chunks: np.ndarray,
        capacity: int, trace: Trace,
    ) -> list[LayerKv]:  # fmt: skip
        """Buffers of `capacity` rows for each step of a period, `chunks` of them in their `rows`.

        Reads all that there is room for at once, the rest in portions. Raises `UnreadableChunks`.
        """
        memory, plan = self.runtime.memory, self.runtime.plan
        steps, groups = plan.period_steps(period), plan.groups(period)
        with trace.span("dispatch", lane="host"):
            buffers = [self.calls.buffers(step.layers, capacity) for step in steps]
        if not len(chunks):
            return buffers
        joined, size = opened.joined, len(rows)
        tables = rotations(self.runtime.layers.config, joined.offsets.tolist())
        document, within = np.zeros((2, capacity), np.int32)
        document[:size], within[:size] = joined.document[rows.chunk], rows.within
        self._make_way(len(chunks) * len(groups))
        room = memory.step_slots
        at_once = len(chunks) * len(groups) <= room
        with self.runtime.open_packs(opened.sources, trace) as packs:
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
                            buffers[index], memory.pool.pages, slots, within, tables, document
                        )
                        for which, group, _ in _wanted(opened, step, now):
                            packs.give_up(which, group, buffers[index][0][0])
        return buffers

    def _slots(
        self, packs: Packs, opened: OpenDocuments, step: Step, chunks: np.ndarray
    ) -> np.ndarray:
        """The slot int32 [P, M] of each chunk in each of a step's layer groups; -1."""
        joined = opened.joined
        slots = np.full((len(step.groups), joined.num_chunks), -1, np.int32)
        wanted = _wanted(opened, step, chunks)
        for which, group, own in wanted:
            packs.demand(which, group, own)
        for which, group, own in wanted:
            slot_of = np.full(opened.prefixes[which].num_chunks, -1, np.int32)
            slot_of[own] = packs.collect(which, group, own)
            for document in (d for d, mine in enumerate(opened.which) if mine == which):
                mine = chunks[joined.document[chunks] == document]
                slots[group - step.groups.start, mine] = slot_of[joined.chunk[mine]]
        return slots


def _wanted(
    opened: OpenDocuments, step: Step, chunks: np.ndarray
) -> list[tuple[int, int, np.ndarray]]:
    """(prefix, layer group, its own chunks) of all packs of some chunks in a step."""
    own = [opened.chunks_of(which, chunks) for which in range(len(opened.prefixes))]
    return [
        (which, group, mine) for group in step.groups for which, mine in enumerate(own) if len(mine)
    ]
