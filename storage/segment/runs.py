"""Where the chunks of a prefix lie: which runs of which open segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import tensorstore as ts

from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.open_segments import Opened

Run = tuple[Span, Opened, int, int]
"""A span, its segment, its first and its end token in the prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The spans of a prefix with their segments, or why one could not be opened."""

    prefix: Prefix
    segments: Sequence[Opened]
    starts: np.ndarray
    """int64 [spans + 1]: the first chunk of each span in the prefix, and the end of the last."""

    @classmethod
    def of(cls, prefix: Prefix, segments: Sequence[Opened]) -> Self:
        """`segments`: one for each span."""
        return cls(prefix, segments, np.cumsum([0, *(s.num_chunks for s in prefix.spans)]))

    def split(self, chunks: np.ndarray) -> list[tuple[Opened, Any, np.ndarray]]:
        """(segment, rows, chunks within it) of every span that `chunks` touch."""
        spans, segments = self.prefix.spans, self.segments
        if len(spans) == 1:
            return [(segments[0], slice(None), chunks + spans[0].first_chunk)]
        which = np.searchsorted(self.starts, chunks, side="right") - 1
        parts: list[tuple[Opened, Any, np.ndarray]] = []
        for i in np.unique(which):
            rows = np.flatnonzero(which == i)
            local = chunks[rows] - self.starts[i] + spans[i].first_chunk
            run = rows[-1] - rows[0] == len(rows) - 1
            parts.append((segments[i], slice(rows[0], rows[-1] + 1) if run else rows, local))
        return parts

    def locate(self, chunk: int) -> tuple[Opened, int]:
        """The segment of a chunk, and the chunk within it."""
        i = int(np.searchsorted(self.starts, chunk, side="right")) - 1
        return self.segments[i], chunk - int(self.starts[i]) + self.prefix.spans[i].first_chunk

    def of_tokens(self) -> list[Run]:
        """(span, segment, first token, end token) of every span, in tokens of the prefix."""
        size, total = self.prefix.layout.chunk_tokens, self.prefix.num_tokens
        bounds = np.minimum(self.starts * size, total).tolist()
        pairs = zip(self.prefix.spans, self.segments, bounds, bounds[1:], strict=False)
        return list(pairs)


def rows_of(data: np.ndarray, rows: np.ndarray) -> Any:
    """Rows of `data` to read into: a view where they lie together, else a TensorStore view."""
    if (np.diff(rows) == 1).all():
        return data[rows[0] : rows[-1] + 1]
    return ts.array(data).oindex[rows]
