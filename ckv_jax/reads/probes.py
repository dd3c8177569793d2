"""The probe of each period: a resident digest, or keys read from the store ahead of their use."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from ckv_jax.buckets import pad_rows
from ckv_jax.config import SystemConfig
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.memory.host import aligned_bytes
from ckv_jax.model.shardings import PROBE, Shardings
from ckv_jax.pipeline.plan import Plan
from ckv_jax.reads.residents import Resident, Residents
from ckv_jax.storage.errors import CkvError
from ckv_jax.storage.place.patience import may_be_left_behind
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.trace import Trace

_THREADS = 2
_SPARES = 2  # buffers kept: one that is scored, one that is read into


class RecomputedKeys(Protocol):
    """Keys that the store could not give, computed again."""

    def keys(self, layer: int) -> np.ndarray:
        """Keys [T, K, D] of one layer. Raises `RecoveryNeeded` while they are to be computed."""
        ...


class ProbeReads:
    """Threads that read probe keys, and memory for them to be used again. Thread-safe.

    Fresh memory costs as much as half the read.
    """

    def __init__(self, *, patience_s: float = 30.0) -> None:
        """`patience_s`: a read that has not come back by then hangs in a system call."""
        self.patience_s = patience_s
        self.threads = ThreadPoolExecutor(_THREADS, "ckv-probe", initializer=may_be_left_behind)
        self._spare: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Page-aligned memory of this shape; its content is whatever was there before."""
        size = int(np.prod(shape)) * dtype.itemsize
        with self._lock:
            fits = [i for i, spare in enumerate(self._spare) if spare.nbytes >= size]
            memory = self._spare.pop(fits[0]) if fits else None
        if memory is None:
            memory = aligned_bytes(size)
        return memory[:size].view(dtype).reshape(shape)

    def give_back(self, keys: np.ndarray) -> None:
        """Nobody reads or writes `keys` any more."""
        memory = keys.reshape(-1).view(np.uint8)
        with self._lock:
            self._spare.append(memory)
            self._spare.sort(key=len, reverse=True)
            del self._spare[_SPARES:]

    def close(self) -> None:
        """Stops the threads."""
        self.threads.shutdown(cancel_futures=True)


class Probes:
    """The probes of one prefix for one batch. What the store cannot give is recomputed."""

    def __init__(
        self,
        *,
        resident: Resident,
        residents: Residents,
        reader: PrefixReader,
        plan: Plan,
        system: SystemConfig,
        reads: ProbeReads,
        recovered: RecomputedKeys,
        trace: Trace,
        shardings: Shardings,
    ) -> None:
        self._resident = resident
        self._shardings = shardings
        self._reader = reader
        self._plan = plan
        self._own = reads
        self._recovered = recovered
        self._trace = trace
        self._held: dict[int, np.ndarray] = {}  # period -> keys that a selection may be reading
        self._reads: dict[int, Future[np.ndarray | None]] = {}
        self._digest = resident.digest
        if system.probe == "digest" and self._digest is None:
            self._digest = self._load_digest(residents)

    def ahead(self, period: int) -> None:
        """Starts reading the probe of `period`, unless it is resident or past the last."""
        if self._digest is None and period < self._plan.periods and period not in self._reads:
            layer = self._plan.first_layer(period)
            self._reads[period] = self._own.threads.submit(self._read, layer)

    def get(self, layers: Sequence[int], period: int) -> list[Probe]:
        """The probes of these layers of `period`, of which keys are read for the first alone;
        waits for them."""
        if self._digest is not None:
            return [self._digest[layer] for layer in layers]
        self.ahead(period)
        start = time.perf_counter_ns()
        keys = self._keys(self._reads.pop(period))
        self._trace.add("probe_io", "host", start, time.perf_counter_ns(), period=period)
        if keys is None:
            return [self._recomputed(layer) for layer in layers]
        self._held[period] = keys
        return [Keys(self._shardings.put(keys, PROBE))]

    def used(self, period: int) -> None:
        """Says that the selection of `period` is known, so that its keys may be overwritten."""
        keys = self._held.pop(period, None)
        if keys is not None:
            self._own.give_back(keys)

    def cancel(self) -> None:
        """Drops reads that have not begun, waits for the others."""
        for read in self._reads.values():
            if not read.cancel() and (keys := self._keys(read)) is not None:
                self._own.give_back(keys)
        self._reads.clear()

    def _keys(self, read: Future[np.ndarray | None]) -> np.ndarray | None:
        """What a read brought; None, too, where the disk does not answer."""
        try:
            return read.result(self._own.patience_s)
        except TimeoutError:
            return None

    @property
    def _tokens(self) -> int:
        return self._resident.probe_chunks * self._resident.prefix.layout.chunk_tokens

    def _read(self, layer: int) -> np.ndarray | None:
        layout = self._resident.prefix.layout
        tokens = self._resident.prefix.num_tokens
        keys = self._own.take(
            (self._tokens, layout.probe_heads, layout.head_dim), layout.numpy_dtype
        )
        keys[tokens:] = 0
        start = time.perf_counter_ns()
        try:
            good = self._reader.read_probe(layer, keys[:tokens])
        except CkvError:
            return None  # a read that was given up may still write: this memory is not used again
        self._trace.add("probe_read", "ssd", start, time.perf_counter_ns(), layer=layer)
        size, prefix = tokens * keys[0].nbytes, self._resident.prefix.id
        self._trace.count_bytes("ssd", size, prefix=prefix)
        return keys if good == tokens else None

    def _load_digest(self, residents: Residents) -> dict[int, Probe]:
        start = time.perf_counter_ns()
        try:
            data = self._reader.read_digest()
        except CkvError:
            data = None  # late, or out of reach: a miss like any other
        if data is None:
            self._trace.count("recomputed_probes", self._plan.periods)
            layers = self._resident.prefix.layout.digest_layers
            return {layer: self._recomputed(layer) for layer in layers}
        residents.keep_digest(self._resident, data)
        size = sum(array.nbytes for array in data.arrays.values())
        self._trace.count_bytes("ssd", size, prefix=self._resident.prefix.id)
        self._trace.add("probe_io", "host", start, time.perf_counter_ns(), kind=data.kind)
        assert self._resident.digest is not None
        return self._resident.digest

    def _recomputed(self, layer: int) -> Keys:
        self._trace.count("recomputed_probes", 1)
        layout = self._resident.prefix.layout
        heads = layout.probe_heads if layout.probe == "heads" else layout.num_kv_heads
        keys = self._recovered.keys(layer)[:, :heads]
        padded = pad_rows(np.ascontiguousarray(keys), self._tokens)
        return Keys(self._shardings.put(padded, PROBE))
