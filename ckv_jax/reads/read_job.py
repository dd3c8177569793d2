"""One read of a few packs into one contiguous buffer, and what came of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ckv_jax.pipeline.buckets import bucket
from ckv_jax.trace import Trace

if TYPE_CHECKING:
    from ckv_jax.reads.prefetcher import Prefetcher


class PackReader(Protocol):
    """What the prefetcher needs of `storage.PrefixReader`."""

    def read_packs(
        self,
        group: int,
        chunks: npt.NDArray[np.int64],
        out: npt.NDArray[Any],
        *,
        rows: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Fills `rows` of `out`, or all of it; bool [n], False for packs not to be had."""
        ...


class RequestToken:
    """Whose reads these are; `Prefetcher.cancel` takes one. Made by `Prefetcher.owner`."""

    __slots__ = ("jobs",)

    def __init__(self) -> None:
        self.jobs: dict[ReadJob, None] = {}


class State(enum.Enum):
    """Where a job stands. Only speculation is ever IDLE, only a demand WAITING."""

    IDLE = enum.auto()  # has no buffer and asks for none
    WAITING = enum.auto()  # for a buffer
    QUEUED = enum.auto()  # for a thread
    RUNNING = enum.auto()
    READ = enum.auto()
    GONE = enum.auto()  # released or cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """What a job read.

    Attributes:
        ok: bool `[n]`, False where the pack could not be had; its rows are zero.
        rows: `[n, *pack_shape]` in the layout's dtype, C-contiguous and on memory pages unless no
            row is ok. Valid until the job's `release`: on a CPU a jitted call may alias it.
        padded: the same memory with as many rows as `bucket(n)`, so that few shapes reach the
            device; what stands past n means nothing.
        bytes: read from the store.
        t0_ns, t1_ns: start and end of the read, `time.perf_counter_ns`; 0 if it never started.
        error: why nothing was read, if the reader failed as a whole.
    """

    ok: npt.NDArray[np.bool_]
    rows: npt.NDArray[Any]
    padded: npt.NDArray[Any]
    bytes: int
    t0_ns: int
    t1_ns: int
    error: str | None


class ReadJob:
    """A submitted read. Its fields change under the prefetcher's lock; callers use the methods.

    Attributes:
        chunks: int64 `[n]`, chunk ids, in the order of the result's rows.
        group: layer group.
        demanded: False while it is speculation.
        pool, slots: the array and its rows `[n]` that are read into, in place of a buffer of the
            prefetcher's; the caller owns them.
        settled: of a read that was given up: whether it has ended, and no longer writes.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        reader: PackReader,
        group: int,
        chunks: npt.NDArray[np.int64],
        pack_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        demanded: bool,
        owner: RequestToken,
        trace: Trace | None,
        pool: npt.NDArray[Any] | None = None,
        slots: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.chunks = chunks
        self.group = group
        self.demanded = demanded
        self._prefetcher = prefetcher
        self.reader = reader
        self.shape = (bucket(len(chunks)), *pack_shape)
        self.dtype = dtype
        self.size = math.prod(self.shape) * dtype.itemsize  # of the buffer
        self.read_bytes = self.size // self.shape[0] * len(chunks)
        self.owner = owner
        self.trace = trace
        self.pool = pool
        self.slots = slots
        self.state = State.IDLE
        self.offset: int | None = None  # of the block in the arena; None for private memory
        self.block: npt.NDArray[np.uint8] | None = None
        self.taken = False  # the caller has seen the rows: only `release` may free them
        self.dropped = False  # to be freed as soon as the running read ends
        self.ok = np.zeros(len(chunks), np.bool_)
        self.error: str | None = None
        self.settled: Callable[[], bool] | None = None  # of a read given up that may still write
        self.t0_ns = 0
        self.t1_ns = 0

    def result(self, timeout: float | None = None) -> ReadResult:
        """Waits for the read and hands over its rows until `release`.

        Never raises for a failed read: packs that could not be had are not `ok`. A job that was
        refused, revoked or cancelled has none that is.

        Raises:
            TimeoutError: nothing yet after `timeout` seconds; the job goes on.
        """
        return self._prefetcher.wait_for(self, timeout)

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self.state in (State.IDLE, State.READ, State.GONE)

    def placed(self) -> bool:
        """Whether it has memory to be read into: refused and revoked speculation has none."""
        return self.block is not None or (self.slots is not None and self.state is not State.GONE)

    def started(self) -> bool:
        """Whether bytes were asked of the store."""
        return self.t0_ns > 0

    def release(self) -> None:
        """Gives the buffer back; the rows must no longer be in use. Idempotent."""
        self._prefetcher.release(self)

    def view(self) -> npt.NDArray[Any]:
        """The rows; zeros that take no memory where there is no buffer, or none to be trusted."""
        return self.padded()[: len(self.chunks)]

    def padded(self) -> npt.NDArray[Any]:
        """All rows of the buffer, `bucket(n)` of them."""
        if self.block is None or self.settled is not None:
            return np.broadcast_to(np.zeros((), self.dtype), self.shape)
        return self.block.view(self.dtype).reshape(self.shape)
