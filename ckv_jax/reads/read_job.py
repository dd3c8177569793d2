"""One read of a few packs into room that its caller gives, and what came of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckv_jax.memory.landing import Room
from ckv_jax.trace import Trace


class PackReader(Protocol):
    """What the prefetcher needs of `storage.PrefixReader`."""

    def read_packs(
        self,
        group: int | npt.NDArray[np.int64],
        chunks: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
        *,
        rows: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Fills `rows` of `out`, or all of it; bool [n], False for packs that could not be read."""
        ...


class State(enum.Enum):
    """Where a job stands."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()  # read, well or badly, or never to be read


class ReadJob:
    """A read of packs of one prefix. Its fields change under the prefetcher's lock.

    Attributes:
        group: layer group of all packs, or of each, int64 `[n]`.
        first_group: the first of them.
        chunks: int64 `[n]`, chunk ids, in the order of `room.rows`.
        demanded: False while nobody waits for it.
        sure: it will be demanded in any case: no speculation, only early.
        ok: bool `[n]`, False where the pack could not be had; meaningful once ended.
        error: why nothing was read, if the reader failed as a whole.
        settled: of a read that was given up and may still write: whether it has ended.
        t0_ns, t1_ns: start and end of the read, `time.perf_counter_ns`; 0 if it never started.
    """

    def __init__(
        self,
        reader: PackReader,
        group: int | npt.NDArray[np.int64],
        chunks: npt.NDArray[np.int64],
        room: Room,
        *,
        demanded: bool,
        sure: bool = False,
        trace: Trace | None = None,
        prefix: str | None = None,
        span: str = "pack_read",
        num_bytes: int | None = None,
    ) -> None:
        """`span`: what the trace calls it; `num_bytes` that it asks the store for, default: as many
        as its room takes."""
        self.reader = reader
        self.group = group
        self.first_group = group if isinstance(group, int) else int(group.min())
        self.chunks = chunks
        self.room = room
        self.demanded = demanded
        self.sure = sure
        self.trace = trace
        self.prefix = prefix
        self.span = span
        row = int(room.array[0].nbytes)
        self.num_bytes = len(chunks) * row if num_bytes is None else num_bytes
        self.state = State.QUEUED
        self.ok = np.zeros(len(chunks), np.bool_)
        self.error: str | None = None
        self.settled: Callable[[], bool] | None = None
        self.t0_ns = 0
        self.t1_ns = 0
        self.left = False  # its thread hangs in a system call, and nobody waits for it any more
