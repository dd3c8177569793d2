"""Reads of one segment's probe keys: all in one, or pages of them, all in flight at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tensorstore as ts

from ckv_jax.storage.place.kernel_queue import KernelRead
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.segment.deadline import Deadline
from ckv_jax.storage.segment.segment import Segment

_PIECE_BYTES = 8 << 20


def read_part(
    segment: Segment, row: int, part: np.ndarray, deadline: Deadline, patience: Patience
) -> int:
    """Read the first tokens of a segment's probe layer into `part`; how many are good."""
    block = segment.manifest.arrays["probe"].inner[1]
    step = max(1, _PIECE_BYTES // (block * part[0].nbytes)) * block
    begun: list[tuple[int, Any]] = []
    for at in range(0, len(part), step):
        begin = partial(_begin_direct, segment, row, at, part[at : at + step], deadline)
        direct = deadline.start(patience, "starting to read a probe", begin)
        through = None if direct else _begin(segment, row, part, at, step, deadline)
        begun.append((at, direct or through))
    arrived = len(part)
    for at, future in begun:  # all of them: none may write when this returns
        good = deadline.wait(future, "reading a probe")
        if not good and isinstance(future, KernelRead):
            again = _begin(segment, row, part, at, step, deadline)
            good = deadline.wait(again, "reading a probe again")
        arrived = arrived if good else min(arrived, at)
    return segment.probe_good(row, part[:arrived])


def read_pages(
    segment: Segment,
    row: int,
    first: np.ndarray,
    tokens: np.ndarray,
    data: np.ndarray,
    rows: np.ndarray,
    deadline: Deadline,
    patience: Patience,
) -> np.ndarray:
    """Read runs of `tokens` int [n] tokens, from chunks `first` [n] of a probe layer on, into the
    starts of `rows` [n] of uint8 `data` [_, R]; int64 [n], how many leading tokens are good."""
    layout = segment.manifest.layout
    heads, dim, kind = layout.probe_heads, layout.head_dim, layout.disk_dtype
    sizes = tokens * (heads * dim * kind.itemsize)
    parts = [
        data[at, :size].view(kind).reshape(-1, heads, dim)
        for at, size in zip(rows.tolist(), sizes.tolist(), strict=True)
    ]
    good = np.zeros(len(rows), np.int64)

    def check(page: int) -> None:
        good[page] = segment.probe_good(row, parts[page], int(first[page]))

    def begin() -> KernelRead | None:
        direct = segment.begin_probe_pages_direct(row, first, sizes, data, rows)
        deadline.follow(direct)
        return direct

    direct = deadline.start(patience, f"starting to read {len(rows)} pages of a probe", begin)
    if direct is not None:
        while not direct.ended:
            for page in deadline.wait_some(direct, "reading a probe").tolist():
                check(page)
    left = np.flatnonzero(good < tokens).tolist()
    if left:
        size = int(sizes[left].sum())
        deadline.admit(size, "waiting to read a probe")
        with ts.Batch() as batch:
            begun = [
                segment.begin_probe(row, int(first[i]) * layout.chunk_tokens, parts[i], batch)
                for i in left
            ]
        deadline.watch(begun, size)
        for page, future in zip(left, begun, strict=True):
            if deadline.wait(future, "reading a probe"):
                check(page)
            else:
                good[page] = 0
    return good


def _begin_direct(
    segment: Segment, row: int, at: int, out: np.ndarray, deadline: Deadline
) -> KernelRead | None:
    direct = segment.begin_probe_direct(row, at, out)
    deadline.follow(direct)
    return direct


def _begin(
    segment: Segment, row: int, part: np.ndarray, at: int, step: int, deadline: Deadline
) -> Any:
    piece = part[at : at + step]
    deadline.admit(piece.nbytes, "waiting to read a probe")
    future = segment.begin_probe(row, at, piece, None)
    deadline.watch([future], piece.nbytes)
    return future
