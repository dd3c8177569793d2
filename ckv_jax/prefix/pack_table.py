"""What a batch knows of its packs: where each is, and which read brings it.

A pack is named by its code, a number that says of which of the batch's prefixes, layer group and
chunk it is. So all that a period asks of many prefixes, layer groups and KV heads is one array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckv_jax.prefix.open_prefix import Source

WAITING = -1
"""In place of a read's number: demanded, with no room yet."""


class PackTable:
    """Columns by code, of packs of `sources`. See `Packs`, which alone changes them.

    Nothing is stored of packs that no step asks for: memory that was never touched takes no room.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._chunks = max([len(source.first_page) for source in sources])
        self._of_prefix = sources[0].groups * self._chunks
        self._first, self._stride = np.zeros((2, len(sources) * self._chunks), np.int64)
        for which, source in enumerate(sources):
            mine = slice(which * self._chunks, which * self._chunks + len(source.first_page))
            self._first[mine] = source.first_page
            self._stride[mine] = source.page_stride
        size = len(sources) * self._of_prefix
        self._device, self._host, self.read = np.zeros((3, size), np.int32)
        # of the first two: slots and 1 more; of the third: the number of the read that is to bring
        # a pack, from 1; `WAITING`; or 0
        self.pinned, self.fresh, self._marked = np.zeros((3, size), bool)
        # cached packs that the batch pins; packs in device slots that it took; all False between
        # two calls
        self.every = range(size)
        """All codes."""

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
        which, rest = np.divmod(codes, self._of_prefix)
        group, chunk = np.divmod(rest, self._chunks)
        chunk += which * self._chunks
        found: np.ndarray = self._first[chunk] + group * self._stride[chunk]
        return found

    def of_group(self, which: int, group: int) -> range:
        """The codes of one layer group of a prefix."""
        first = which * self._of_prefix + group * self._chunks
        return range(first, first + self._chunks)

    def by_read(self, codes: np.ndarray, *, single: bool, most: int) -> list[np.ndarray]:
        """Equal parts of packs that one read could bring: of one prefix each, with `single` of one
        layer group, of at most so many."""
        if not len(codes):
            return []
        keys = codes // (self._chunks if single else self._of_prefix)
        if (keys == keys[0]).all():
            whole = [codes]
        else:
            order = np.argsort(keys, kind="stable")
            whole = np.split(codes[order], np.flatnonzero(np.diff(keys[order])) + 1)
        parts: list[np.ndarray] = []
        for some in whole:
            parts += np.array_split(some, -(-len(some) // most)) if len(some) > most else [some]
        return parts

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
        held: np.ndarray = (self._device[codes] | self._host[codes]) > 0
        return held

    def held(self, some: range) -> np.ndarray:
        """Codes int64 [n] of the packs of a range that the batch holds."""
        mine = slice(some.start, some.stop)
        return some.start + np.flatnonzero(self._device[mine] | self._host[mine])

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
        for column in (self._device, self._host, self.pinned, self.fresh):
            column[codes] = 0
