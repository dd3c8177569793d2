"""What a batch knows of its packs: where each is, and which read brings it.

A pack is named by its code, a number that says of which of the batch's prefixes, layer group and
chunk it is. So all that a step asks of many prefixes, layer groups and KV heads is one array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckv_jax.reads.source import Source

WAITING = -1
"""In place of a read's number: demanded, with no room yet."""


class PackTable:
    """Columns by code, of packs of `sources`. See `Packs`, which alone changes them.

    Nothing is stored of packs that nobody asks for: memory that was never touched takes no room.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        views = [source.prefix for source in sources]
        layout = views[0].prefix.layout
        rows = layout.groups if sources[0].kind == "pack" else len(layout.probe_layers)
        self._chunks = max(len(view.first_page) for view in views)
        self._of_prefix = rows * self._chunks
        self._first, self._stride = np.zeros((2, len(views), self._chunks), np.int64)
        for which, view in enumerate(views):
            self._first[which, : len(view.first_page)] = view.first_page
            self._stride[which, : len(view.first_page)] = view.page_stride
        size = len(views) * self._of_prefix
        self._device, self._host, self.read = np.zeros((3, size), np.int32)
        # of the first two: slots and 1 more; of the third: the number of the read that is to bring
        # a pack, from 1; `WAITING`; or 0
        self.used = np.zeros(size, bool)
        """Packs that somebody collected."""
        self._marked = np.zeros(size, bool)  # all False between two calls

    def codes(
        self, which: np.ndarray | int, group: np.ndarray | int, chunk: np.ndarray
    ) -> np.ndarray:
        """Codes int64 [n] of packs; what is one number holds for all."""
        found: np.ndarray = (
            which * self._of_prefix + group * self._chunks + np.asarray(chunk, np.int64)
        )
        return found

    def parts(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(which prefix, layer group, chunk) int64 [n] each of packs."""
        which, rest = np.divmod(codes, self._of_prefix)
        return which, *np.divmod(rest, self._chunks)

    def pages(self, codes: np.ndarray) -> np.ndarray:
        """Page numbers int64 [n] of packs."""
        which, group, chunk = self.parts(codes)
        found: np.ndarray = self._first[which, chunk] + group * self._stride[which, chunk]
        return found

    def of_group(self, which: int, group: int) -> range:
        """The codes of one layer group of a prefix."""
        first = which * self._of_prefix + group * self._chunks
        return range(first, first + self._chunks)

    def groups(self, codes: np.ndarray) -> list[range]:
        """The codes of each layer group that some packs are of."""
        starts = np.unique(codes // self._chunks) * self._chunks
        return [range(first, first + self._chunks) for first in starts.tolist()]

    def by_read(self, codes: np.ndarray, *, single: bool, most: int) -> list[np.ndarray]:
        """Equal parts of packs that one read could bring: of one prefix each, with `single` of one
        layer group, of at most so many."""
        keys = codes // (self._chunks if single else self._of_prefix)
        order = np.argsort(keys, kind="stable")
        whole = np.split(codes[order], np.flatnonzero(np.diff(keys[order])) + 1)
        return [
            part
            for some in whole
            if len(some)
            for part in np.array_split(some, -(-len(some) // most))
        ]

    def reads(self, codes: range | np.ndarray) -> list[int]:
        """The reads that are to bring some of these, in the order in which they began."""
        some = slice(codes.start, codes.stop) if isinstance(codes, range) else codes
        numbers = self.read[some]
        return sorted(set(numbers[numbers > 0].tolist()))  # few: faster than `np.unique`

    def first_read(self, codes: np.ndarray) -> int | None:
        """The read of these that began first; None: there is none."""
        numbers = self.read[codes]
        numbers = numbers[numbers > 0]
        return int(numbers.min()) if len(numbers) else None

    def among(self, codes: np.ndarray, some: np.ndarray) -> np.ndarray:
        """bool [n]: which of `codes` are among others. There are many short ones to look for, where
        `np.isin` takes ten times as long."""
        self._marked[some] = True
        found: np.ndarray = self._marked[codes]
        self._marked[some] = False
        return found

    def known(self, codes: np.ndarray) -> np.ndarray:
        """bool [n]: whether the batch holds packs, on the device or the host."""
        held: np.ndarray = (self._device[codes] > 0) | (self._host[codes] > 0)
        return held

    def device(self, codes: np.ndarray) -> np.ndarray:
        """Device slots int32 [n]; -1: not there."""
        slots: np.ndarray = self._device[codes] - 1
        return slots

    def host(self, codes: np.ndarray) -> np.ndarray:
        """Host slots int32 [n]; -1: not there."""
        slots: np.ndarray = self._host[codes] - 1
        return slots

    def put(self, codes: np.ndarray, device: np.ndarray, host: np.ndarray | int = -1) -> None:
        """Packs are in these device slots and host slots; -1: not there."""
        self._device[codes] = device + 1
        self._host[codes] = host + 1

    def clear(self, codes: np.ndarray) -> None:
        """The batch holds these packs no longer."""
        self._device[codes] = 0
        self._host[codes] = 0


class Codes:
    """Some packs, that come in many at a time and leave by layer group: which ones a batch has to
    give back, slots that it took or pins, without a search through the table."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def add(self, codes: np.ndarray) -> None:
        """These come in."""
        if len(codes):
            self._parts.append(codes)

    def all(self) -> np.ndarray:
        """int64 [n], all that are in."""
        self._parts = [np.concatenate(self._parts)] if len(self._parts) > 1 else self._parts
        return self._parts[0] if self._parts else np.zeros(0, np.int64)

    def take(self, some: range | None = None) -> np.ndarray:
        """Those within a range leave, or all: int64 [n]."""
        known = self.all()
        if some is None:
            self._parts = []
            return known
        mine = (known >= some.start) & (known < some.stop)
        self._parts = [known[~mine]] if not mine.all() else []
        taken: np.ndarray = known[mine]
        return taken
