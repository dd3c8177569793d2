"""The probe of each period: resident digest, or keys read from the store ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from ckv_jax.config import SystemConfig
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.pipeline.buckets import pad_rows
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.recovery import Recovery
from ckv_jax.reads.key_buffers import KeyBuffers
from ckv_jax.reads.residents import PrefixView, Views
from ckv_jax.storage.errors import CkvError
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.trace import Trace


class Probes:
    """The probes of one request. What the store cannot give is recomputed."""

    def __init__(
        self,
        *,
        view: PrefixView,
        views: Views,
        reader: PrefixReader,
        plan: Plan,
        system: SystemConfig,
        threads: ThreadPoolExecutor,
        buffers: KeyBuffers,
        recovery: Recovery,
        trace: Trace,
    ) -> None:
        self._view = view
        self._reader = reader
        self._plan = plan
        self._threads = threads
        self._buffers = buffers
        self._held: dict[int, np.ndarray] = {}  # period -> keys that a selection may be reading
        self._recovery = recovery
        self._trace = trace
        self._reads: dict[int, Future[np.ndarray | None]] = {}
        self._digest = view.digest
        if system.probe == "digest" and self._digest is None:
            self._digest = self._load_digest(views)

    @property
    def _tokens(self) -> int:
        return self._view.probe_chunks * self._view.prefix.layout.chunk_tokens

    def ahead(self, period: int) -> None:
        """Starts reading the probe of `period`, unless it is resident or past the last."""
        if self._digest is None and period < self._plan.periods and period not in self._reads:
            layer = self._plan.first_layer(period)
            self._reads[period] = self._threads.submit(self._read, layer)

    def get(self, layers: Sequence[int], period: int) -> list[Probe]:
        """The probes of these layers of `period`, of which keys are read for the first alone;
        waits for them."""
        if self._digest is not None:
            return [self._digest[layer] for layer in layers]
        self.ahead(period)
        start = time.perf_counter_ns()
        keys = self._reads.pop(period).result()
        self._trace.add("probe_io", "host", start, time.perf_counter_ns(), period=period)
        if keys is None:
            return [self._recomputed(layer) for layer in layers]
        self._held[period] = keys
        return [Keys(jax.device_put(keys))]

    def used(self, period: int) -> None:
        """Says that the selection of `period` is known, so that its keys may be overwritten."""
        keys = self._held.pop(period, None)
        if keys is not None:
            self._buffers.give_back(keys)

    def cancel(self) -> None:
        """Drops reads that have not begun, waits for the others."""
        for read in self._reads.values():
            if not read.cancel() and (keys := read.result()) is not None:
                self._buffers.give_back(keys)
        self._reads.clear()

    def _read(self, layer: int) -> np.ndarray | None:
        layout = self._view.prefix.layout
        tokens = self._view.prefix.num_tokens
        keys = self._buffers.take(
            (self._tokens, layout.probe_heads, layout.head_dim), layout.numpy_dtype
        )
        keys[tokens:] = 0
        start = time.perf_counter_ns()
        try:
            good = self._reader.read_probe(layer, keys[:tokens])
        except CkvError:
            return None
        self._trace.add("probe_read", "ssd", start, time.perf_counter_ns(), layer=layer)
        self._trace.count_bytes("ssd", tokens * keys[0].nbytes)
        return keys if good == tokens else None

    def _load_digest(self, views: Views) -> dict[int, Probe]:
        start = time.perf_counter_ns()
        data = self._reader.read_digest()
        if data is None:
            self._trace.count("recomputed_probes", self._plan.periods)
            layers = self._view.prefix.layout.digest_layers
            return {layer: self._recomputed(layer) for layer in layers}
        views.keep_digest(self._view, data)
        self._trace.count_bytes("ssd", sum(array.nbytes for array in data.arrays.values()))
        self._trace.add("probe_io", "host", start, time.perf_counter_ns(), kind=data.kind)
        assert self._view.digest is not None
        return self._view.digest

    def _recomputed(self, layer: int) -> Keys:
        self._trace.count("recomputed_probes", 1)
        layout = self._view.prefix.layout
        heads = layout.probe_heads if layout.probe == "heads" else layout.num_kv_heads
        keys = self._recovery.keys(layer)[:, :heads]
        return Keys(jax.device_put(pad_rows(keys, self._tokens)))
