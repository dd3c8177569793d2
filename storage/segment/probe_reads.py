"""Reads of one segment's probe keys: contiguous, in pieces, all of them in flight at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

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
