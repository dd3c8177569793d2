"""One prefix of a decode batch, and the rows that stand on it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckv_jax.buckets import batch_bucket
from ckv_jax.pipeline.chooser import Chooser
from ckv_jax.reads.resident import Resident


@dataclass(slots=True)
class PrefixRows:
    """Rows of a decode batch that choose among the chunks of one prefix."""

    resident: Resident
    choosers: list[Chooser]
    rows: np.ndarray
    """int32 [b], a bucket: places in the batch, those past the choosers' are padding."""
    limits: np.ndarray
    """int32 [b]: chunks that each row chooses, 0 of padding."""
    near: np.ndarray
    """int32 [b]: chunks of each row that are chosen or near misses."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Chooser]], near: float) -> PrefixRows:
        """Rows of one prefix, by their places. `near`: chunks that are chosen or near misses, for
        each that is chosen."""
        choosers = [chooser for _, chooser in rows]
        padding = [0] * (batch_bucket(len(rows)) - len(rows))
        wide = [math.ceil(chooser.limit * near) for chooser in choosers]
        return cls(
            resident=choosers[0].window.resident,
            choosers=choosers,
            rows=np.array([*(place for place, _ in rows), *padding], np.int32),
            limits=np.array([*(chooser.limit for chooser in choosers), *padding], np.int32),
            near=np.array([*wide, *padding], np.int32),
        )

    def before(self, period: int, parts: int, lengths: np.ndarray) -> np.ndarray:
        """Scores float32 [b * J, M] of earlier tokens, which count as well, for the J choices of a
        period that each row makes. `lengths` int [B]: tokens in the buffers of the batch's rows."""
        shape = (len(self.rows), parts, self.resident.probe_chunks)
        scores = np.zeros(shape, np.float32)
        for row, chooser in enumerate(self.choosers):
            if chooser.remembers:
                scores[row] = chooser.before(period, int(lengths[self.rows[row]]))
        return scores.reshape(-1, shape[2])


def by_prefix(rows: Mapping[int, Chooser], near: float) -> list[PrefixRows]:
    """The choosing rows of a batch, by their places, each with the others of its prefix."""
    found: dict[Hashable, list[tuple[int, Chooser]]] = {}
    for place, chooser in sorted(rows.items()):
        key = id(chooser.window.resident), place if chooser.apart else None
        found.setdefault(key, []).append((place, chooser))
    return [PrefixRows.of(rows, near) for rows in found.values()]
