"""One request's way through the layers of a rival: what is read, when, and what is waited for."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.buckets import bucket
from ckv_jax.config import SystemConfig
from ckv_jax.kernels_pallas.score.probe import Keys
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.batch import Batch
from ckv_jax.reads.packs import Packs
from ckv_jax.rivals.layers import Choice, Qkv, RivalLayers
from ckv_jax.selection.impress import similarity_threshold
from ckv_jax.trace import Trace

READ_AHEAD = 2
"""Layers whose unconditional reads (everything, all keys, or the probe) are under way while one
computes, where the pool has room for them. With two the reader never runs dry; more would only hold
more buffers."""

LEAST_TOKENS = 16
"""Smallest bucket of chosen tokens."""


class LayerSchedule:
    """One request's way through the layers."""

    def __init__(
        self,
        layers: RivalLayers,
        memory: Memory,
        system: SystemConfig,
        batch: Batch,
        packs: Packs,
        trace: Trace,
    ) -> None:
        self.choices: list[Choice] = []
        self._layers = layers
        self._memory = memory
        self._system = system
        [member] = batch.members  # rivals batch over one prefix
        self._resident = resident = member.resident
        self._batch = batch
        self._packs = packs
        self._probes = member.probes
        self._trace = trace
        self._num_layers = resident.prefix.layout.num_layers
        self._chunk_tokens = resident.prefix.layout.chunk_tokens
        self._all = np.arange(resident.num_chunks)
        self._ahead = 0 if system.prefetch == "none" else READ_AHEAD
        if system.selector == "all":  # cached packs of layers ahead keep their slots as well
            fit = memory.step_slots // (2 * resident.num_chunks)
            self._ahead = min(self._ahead, max(0, fit - 1))
        self._tokens = np.int32(resident.prefix.num_tokens)
        self._budget = min(
            bucket(int(batch.limits.max()), least=LEAST_TOKENS),
            resident.probe_chunks * self._chunk_tokens,
        )
        self._lengths = np.zeros(resident.probe_chunks, np.int32)
        self._lengths[: resident.num_chunks] = resident.chunk_lengths

    def begin(self) -> None:
        """Starts the first layers' unconditional reads."""
        for layer in range(self._ahead):
            self._read_ahead(layer)

    @property
    def shape(self) -> tuple[int, ...]:
        """What a scoring call is compiled for."""
        return (*self._batch.tokens.shape, self._resident.probe_chunks, self._budget)

    def prepare_fallback(self, hidden: Array) -> None:
        """Compiles what a later layer or request needs unexpectedly: all keys, every head its own
        tokens."""
        anywhere = np.zeros(self._resident.probe_chunks, np.int32)  # what comes of it is not used
        qkv = self._layers.project(0, hidden, self._batch.start)
        rows, chunks = len(self._batch.lengths), self._resident.probe_chunks
        nothing = Choice(
            ids=jnp.zeros((rows, self._budget), jnp.int32),
            counts=jnp.zeros((rows, chunks), jnp.int32),
            mass=jnp.zeros(rows, jnp.float32),
            similarity=jnp.zeros(rows, jnp.float32),
            importance=jnp.zeros(chunks * self._chunk_tokens, jnp.float32),
        )
        choice = self._choose_by_heads(qkv, anywhere, nothing, np.zeros(rows, bool))
        self._layers.attend_tokens(
            0, hidden, qkv, self._memory.pool.pages, anywhere, anywhere, choice.ids
        )

    def attend_all(self, layer: int, hidden: Array) -> Array:
        """A layer over the whole prefix (AttentionStore)."""
        self._read_ahead(layer + self._ahead)
        self._record(2 * layer, self._all, None)
        self._record(2 * layer + 1, self._all, None)
        with self._span("dispatch", layer):
            keys = self._collect(2 * layer, self._all)
            values = self._collect(2 * layer + 1, self._all)
            pages = self._memory.pool.pages
            hidden = self._layers.attend_all(
                layer, hidden, self._batch.start, pages, keys, values, self._lengths
            )
        self._done(layer, hidden, self._resident.num_chunks)
        return hidden

    def attend_chosen(self, layer: int, hidden: Array) -> Array:
        """A layer over its important tokens (H2O, IMPRESS)."""
        with self._span("dispatch", layer):
            qkv = self._layers.project(layer, hidden, self._batch.start)
        key_table: np.ndarray | None = None
        if self._system.selector == "impress":
            choice = self._by_probe(layer, qkv)
            counts, agreed = self._fetch(layer, choice)
            self._probes.used(layer)
            real = self._batch.lengths > 0
            everyone = bool(agreed[real].all())
            self._trace.count("layers_agreed" if everyone else "layers_fell_back", 1)
            if not everyone:
                key_table = self._all_keys(layer)
                with self._span("dispatch", layer):
                    choice = self._choose_by_heads(qkv, key_table, choice, agreed)
                counts, _ = self._fetch(layer, choice)
        else:
            key_table = self._all_keys(layer)
            with self._span("dispatch", layer):
                choice = self._choose_by_keys(qkv, key_table)
            counts, _ = self._fetch(layer, choice)
        chunks = np.flatnonzero(counts)
        keys = chunks if key_table is None else self._all
        with self._span("submit", layer):
            self._packs.demand(0, 2 * layer + 1, chunks)
            if key_table is None:
                self._packs.demand(0, 2 * layer, chunks)
        self._record(2 * layer, keys, counts)
        self._record(2 * layer + 1, chunks, counts)
        with self._span("dispatch", layer):
            if key_table is None:
                key_table = self._collect(2 * layer, chunks)
            value_table = self._collect(2 * layer + 1, chunks)
            hidden = self._layers.attend_tokens(
                layer, hidden, qkv, self._memory.pool.pages, key_table, value_table, choice.ids
            )
        self._done(layer, hidden, len(chunks))
        self.choices.append(choice)
        return hidden

    def _by_probe(self, layer: int, qkv: Qkv) -> Choice:
        self._read_ahead(layer + self._ahead)
        with self._span("dispatch", layer):
            [probe] = self._probes.get([layer], layer)
            assert isinstance(probe, Keys)
            return self._layers.choose_by_probe(
                qkv, self._batch.lengths, probe.keys, self._tokens, self._batch.limits,
                n=self._budget, chunk_tokens=self._chunk_tokens,
                heads=self._system.probe_heads,
            )  # fmt: skip

    def _all_keys(self, layer: int) -> np.ndarray:
        """Where the keys of all chunks are, once they are there."""
        group = 2 * layer
        with self._span("submit", layer):
            self._packs.demand(0, group, self._all)
        if self._system.selector == "h2o":
            self._read_ahead(layer + self._ahead)
        with self._span("dispatch", layer):
            return self._collect(group, self._all, stage="probe_io")

    def _choose_by_keys(self, qkv: Qkv, table: np.ndarray) -> Choice:
        return self._layers.choose_by_keys(
            qkv, self._batch.lengths, self._memory.pool.pages, table, self._tokens,
            self._batch.limits, n=self._budget,
        )  # fmt: skip

    def _choose_by_heads(
        self, qkv: Qkv, table: np.ndarray, trusted: Choice, agreed: np.ndarray
    ) -> Choice:
        return self._layers.choose_by_heads(
            qkv, self._batch.lengths, self._memory.pool.pages, table, self._tokens,
            self._batch.limits, trusted, agreed, n=self._budget,
        )  # fmt: skip

    def _fetch(self, layer: int, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
        """Important tokens by chunk [M], and in which rows the scoring heads agreed, bool [B]: the
        one sync."""
        start = time.perf_counter_ns()
        choice.counts.block_until_ready()
        ready = time.perf_counter_ns()
        self._trace.add("compute", "compute", start, ready, layer=layer)
        counts, similarity = jax.device_get((choice.counts, choice.similarity))
        rows = self._batch.lengths > 0
        share = self._batch.limits / self._resident.prefix.num_tokens
        agreed = np.asarray(similarity > similarity_threshold(share))
        self._trace.add("select", "host", ready, time.perf_counter_ns(), layer=layer)
        return counts[rows].max(axis=0)[: self._resident.num_chunks], agreed

    def _read_ahead(self, layer: int) -> None:
        """What a layer needs in any case. Keys yield to reads that are waited for right now, and to
        nothing else."""
        if layer >= self._num_layers:
            return
        with self._span("submit", layer):
            match self._system.selector:
                case "all":
                    self._packs.demand(0, 2 * layer, self._all)
                    self._packs.demand(0, 2 * layer + 1, self._all)
                case "h2o":
                    self._packs.ahead(0, 2 * layer, self._all, sure=True)
                case _:
                    self._probes.ahead(layer)

    def _collect(
        self, group: int, chunks: np.ndarray, *, stage: str = "critical_io_wait"
    ) -> np.ndarray:
        """Device slots by chunk, int32 [M] padded, -1 where it was not asked for."""
        table = np.full(self._resident.probe_chunks, -1, np.int32)
        table[chunks] = self._packs.collect(0, group, chunks, stage=stage)
        return table

    def _done(self, layer: int, hidden: Array, selected: int) -> None:
        self._packs.done(0, 2 * layer, hidden)
        self._packs.done(0, 2 * layer + 1, hidden)
        self._trace.count_chunks(selected=selected, total=self._resident.num_chunks)

    def _record(self, group: int, chunks: np.ndarray, counts: np.ndarray | None) -> None:
        """One use of each pack, with the share of its tokens that were important (IMPRESS §4.4.2).

        Also counts the tokens that come from the SSD, and those of them that are needed.
        """
        with self._span("book", group // 2):
            lengths = self._resident.chunk_lengths[chunks]
            needed = lengths if counts is None else counts[chunks]
            pages = self._resident.pages(group, chunks)
            device, host = self._memory.tiers.lookup(pages)
            missing = (device < 0) & (host < 0)
            self._trace.count("ssd_tokens", int(lengths[missing].sum()))
            self._trace.count("ssd_tokens_needed", round(float(needed[missing].sum())))
            self._memory.tiers.record(pages, needed / self._chunk_tokens)

    def _span(self, stage: str, layer: int) -> AbstractContextManager[object]:
        return self._trace.span(stage, lane="host", layer=layer)
