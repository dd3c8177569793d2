"""Several stored prefixes as one text: which token stands where, in which chunk of which part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckv_jax.storage.prefix import Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Chunks of all parts, numbered through in order: [M] of each kind."""

    parts: tuple[Prefix, ...]
    offsets: np.ndarray
    """int64 [n]: position of each part's first token."""
    part: np.ndarray
    """int64 [M]: whose chunk it is."""
    chunk: np.ndarray
    """int64 [M]: its number within the part."""
    first: np.ndarray
    """int64 [M]: position of its first token."""
    length: np.ndarray
    """int64 [M]: its tokens; fewer than a chunk has only where a part ends."""

    @classmethod
    def of(cls, parts: Sequence[Prefix]) -> Joined:
        """Parts of at least one token each, of one layout, in this order."""
        size = parts[0].layout.chunk_tokens
        counts = [part.num_chunks for part in parts]
        offsets = np.cumsum([0] + [part.num_tokens for part in parts])
        part = np.repeat(np.arange(len(parts)), counts)
        chunk = np.concatenate([np.arange(count) for count in counts])
        first = offsets[part] + size * chunk
        return cls(
            parts=tuple(parts),
            offsets=offsets[:-1],
            part=part,
            chunk=chunk,
            first=first,
            length=np.minimum(size, offsets[part + 1] - first),
        )

    @property
    def num_tokens(self) -> int:
        """T, of all parts."""
        return int(self.first[-1] + self.length[-1])

    @property
    def num_chunks(self) -> int:
        """M."""
        return len(self.chunk)

    @property
    def ends(self) -> np.ndarray:
        """The chunks that hold fewer tokens than others: [m]."""
        return np.flatnonzero(self.length < self.parts[0].layout.chunk_tokens)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]."""
        return np.concatenate([part.tokens for part in self.parts])

    def positions(self, chunks: np.ndarray) -> np.ndarray:
        """Those of all tokens of some chunks, int64 [n], in the chunks' order."""
        return _runs(self.first[chunks], self.length[chunks])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A buffer whose rows are the tokens of some chunks, in order of position."""

    chunks: np.ndarray
    """int64 [m], ascending."""
    chunk: np.ndarray
    """int64 [R]: the chunk of each row."""
    within: np.ndarray
    """int64 [R]: the row's place within its chunk."""

    @classmethod
    def of(cls, joined: Joined, chunks: np.ndarray) -> Rows:
        """The rows of `chunks`, ascending."""
        lengths = joined.length[chunks]
        return cls(
            chunks=chunks,
            chunk=np.repeat(chunks, lengths),
            within=_runs(np.zeros(len(chunks), np.int64), lengths),
        )

    def __len__(self) -> int:
        return len(self.chunk)

    def of_chunks(self, chunks: np.ndarray) -> np.ndarray:
        """The rows int64 [n] of some of the chunks, ascending."""
        return np.flatnonzero(np.isin(self.chunk, chunks))


def _runs(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... length[0] of them, then those of the next."""
    before = np.cumsum(length) - length
    runs: np.ndarray = np.arange(int(length.sum())) + np.repeat(first - before, length)
    return runs
