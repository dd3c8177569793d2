"""IMPRESS, as its paper describes it (`impress`).

- §4.3, probe: the first three query heads of a layer select for all. Each has the tokens with the
  largest column sums; the tokens with most votes are taken, ties by attention. Query heads that
  share a key head need its keys once; in the paper's models each has keys of its own.
- §4.3, threshold: the heads are trusted where their mean Jaccard index is over j^0.6, j that of
  random sets. Below it the layer falls back for that question: all keys are read, and each KV head
  has its own tokens, shared by its query heads.
- §6.5, probe keys are stored apart, in pages of a pack's size (`probe_keys`). Two layers' probes
  are read while one computes (Figure 10: one).
- §4.4.1 and §5, reordering: in `reordering`, within a segment, after every four requests over a
  prefix.
- §4.4.2, cache: the number of accesses times a moving average of the share of important tokens, in
  which the latest access weighs a quarter. Whole chunks go to the device.
- §4.1, the radix tree over prefixes is the store's chain of hashes over chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from ckv_jax.baselines.layerwise import (
    LayerCalls,
    LayerSchedule,
    LayerwiseExecutor,
    Qkv,
    TokenSelection,
    importance_of,
    keys_of,
    layer_by_layer,
    sums_of,
)
from ckv_jax.baselines.probe_keys import KeyProbes, PagedKeys
from ckv_jax.baselines.reordering import Reorderer, use_in_order
from ckv_jax.config import OwnParts
from ckv_jax.errors import check_number, check_whole
from ckv_jax.kernels_pallas.score.probe import Keys
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.pipeline.batch import Batch
from ckv_jax.pipeline.layers import Layers
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.policy import Frequency, Importance, LastUsed, Policy, Scores
from ckv_jax.selection.base import chunk_counts, select_units, top_mask
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

PROBE_HEADS = 3
"""The keys of three heads rank the tokens of all of them (§4.3)."""
REORDER_EVERY = 4
"""IMPRESS's paper reorders at intervals, such as ten minutes; a count of requests gives the same
averages whatever the load."""


def importance_ratio(importance: Importance, frequency: Frequency, _: LastUsed) -> Scores:
    """Access frequency x moving average of the share of important tokens (IMPRESS §4.4.2).

    The schedule records that share (0 to 1) where attention-guided policies record attention.
    """
    return importance * frequency


@dataclass(frozen=True, slots=True)
class Impress:
    """The parts of `impress`."""

    heads: int = PROBE_HEADS
    """Query heads that probe, the first of every layer (§4.3); where query heads share a key head,
    they need the keys of fewer heads."""
    alpha: float = 0.6
    """Exponent of the threshold (§4.3, Figure 22): 0 always falls back, and the greater it is, the
    further probe heads may disagree."""
    reorder_every: int = REORDER_EVERY
    """Requests over a prefix after which its order is looked at, again and again, and rewritten in
    the background by the average importance in each layer, where that has changed (§4.4.1); 0:
    never."""

    def __post_init__(self) -> None:
        check_whole("reorder_every", self.reorder_every, least=0)
        check_whole("heads", self.heads, least=1)
        check_number("alpha", self.alpha)
        if self.alpha < 0:
            raise ValueError(f"got alpha={self.alpha}, expected 0 or more")

    def layout(self, layout: Layout, num_heads: int) -> Layout:
        """Keys and values are a read each; keys of the probing heads have an array of their own."""
        shared = num_heads // layout.num_kv_heads
        width = min(-(-self.heads // shared), layout.num_kv_heads)
        return replace(layout, kv_together=False, probe="heads", probe_width=width)

    def __call__(self, worker: Worker) -> ImpressExecutor:
        """The executor of an engine."""
        return ImpressExecutor(worker, self)

    def own(self) -> OwnParts:
        """For `SystemConfig.own`."""
        return OwnParts(layout=self.layout, executor=self, selects="token", generates=False)


IMPRESS = layer_by_layer(
    "impress",
    policy=Policy(importance_ratio, newest=0.25),
    own=Impress().own(),
)


class ImpressExecutor(LayerwiseExecutor):
    """Layer by layer, over prefixes in the order that their requests have made of them."""

    def __init__(self, worker: Worker, impress: Impress) -> None:
        super().__init__(worker, partial(ProbeFirst, worker, ProbeCalls(worker.layers), impress))
        self._keys = PagedKeys(worker)
        self._reorderer = Reorderer(self._keys, impress.reorder_every)

    def probes(self, opened: OpenPrefix, trace: Trace, stack: ExitStack) -> KeyProbes:
        """The keys of the probing heads."""
        return self._keys.of(opened, trace, stack)

    def note(self, prefix: Prefix, selections: Sequence[TokenSelection]) -> None:
        """What was important counts for the order of the prefix."""
        self._reorderer.note(prefix, [selection.importance for selection in selections])

    def use(self, prefixes: OpenPrefixes, prefix: Prefix) -> OpenPrefix:
        """Its reordered form, once there is one."""
        served = self._reorderer.current(prefix)
        try:
            return use_in_order(prefixes, served)
        except SegmentDamaged:
            self._reorderer.forget(prefix)  # another engine of this store may have a newer form
            again = self._reorderer.current(prefix)
            if again == served:
                raise
            return use_in_order(prefixes, again)

    def settle(self) -> None:
        """Returns once nothing is being rewritten or carried over."""
        self._reorderer.wait()

    def close(self) -> None:
        """Lets the rewrite in progress finish. Idempotent."""
        self._reorderer.close()


class ProbeFirst(LayerSchedule):
    """Each layer over the tokens that its probe heads select, or every head where they disagree."""

    _layers: ProbeCalls
    _probes: KeyProbes

    def __init__(
        self, worker: Worker, calls: ProbeCalls, impress: Impress, batch: Batch, packs: Packs,
        trace: Trace,
    ) -> None:  # fmt: skip
        super().__init__(worker, calls, batch, packs, trace)
        self._impress = impress

    def read_ahead(self, layer: int) -> None:
        """The layer's probe."""
        self._probes.ahead(layer)

    def attend(self, layer: int, hidden: Array) -> Array:
        """The layer over its important tokens and the suffix."""
        qkv = self._project(layer, hidden)
        key_table: np.ndarray | None = None
        self._read_ahead(layer + self._ahead)
        with self._span("dispatch", layer):
            [probe] = self._probes.get([layer], layer)
            assert isinstance(probe, Keys)
            selection = self._layers.select_by_probe(
                qkv, self._batch.lengths, probe.keys, self._tokens, self._batch.limits,
                n=self._budget, chunk_tokens=self._chunk_tokens, heads=self._impress.heads,
            )  # fmt: skip
            if layer == 0:
                self._prepare(hidden, qkv, selection)
        counts, similarity = self._fetch(layer, selection)
        share = self._batch.limits / self._opened.prefix.num_tokens
        agreed = np.asarray(similarity > similarity_threshold(share, self._impress.alpha))
        self._probes.used(layer)
        everyone = bool(agreed[self._batch.lengths > 0].all())
        self._trace.count("layers_agreed" if everyone else "layers_fell_back", 1)
        if not everyone:
            key_table = self._all_keys(layer)
            with self._span("dispatch", layer):
                selection = self._select_by_heads(qkv, key_table, selection, agreed)
            counts, _ = self._fetch(layer, selection)
        return self._attend_selected(layer, hidden, qkv, selection, counts, key_table)

    def _prepare(self, hidden: Array, qkv: Qkv, selection: TokenSelection) -> None:
        """Compiles the fallback at the first request of a shape, so that no later one waits for
        it. `qkv` and `selection` are those of layer 0."""
        shape = (*hidden.shape, self._opened.probe_chunks, self._budget)
        if shape not in self._layers.prepared:
            anywhere = np.zeros(self._opened.probe_chunks, np.int32)  # what comes of it is not used
            agreed = np.zeros(len(hidden), bool)
            ids = self._select_by_heads(qkv, anywhere, selection, agreed).ids
            pages = self._memory.pool.pages
            self._layers.attend_tokens(0, hidden, qkv, pages, anywhere, anywhere, ids)
            self._layers.prepared.add(shape)

    def _select_by_heads(
        self, qkv: Qkv, table: np.ndarray, trusted: TokenSelection, agreed: np.ndarray
    ) -> TokenSelection:
        return self._layers.select_by_heads(
            qkv, self._batch.lengths, self._memory.pool.pages, table, self._tokens,
            self._batch.limits, trusted, agreed, n=self._budget,
        )  # fmt: skip


class ProbeCalls(LayerCalls):
    """And those that select by a probe, or by all keys of each head."""

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.select_by_probe: Callable[..., TokenSelection] = layers.programs.jit(
            _by_probe, static=("n", "heads", "chunk_tokens")
        )
        """(qkv, q_lengths [B], probe [T, P, D], num_tokens, limits [B], n, heads, chunk_tokens) ->
        the tokens that the first `heads` query heads vote for, and how far those agree."""
        self.select_by_heads: Callable[..., TokenSelection] = layers.programs.jit(
            layers.once(_by_heads_of, layers.target), static=("n",)
        )
        """(as `KeyCalls.select_by_keys`, and what is trusted, agreed bool [B], n) -> the fallback:
        every KV head's own tokens by all keys, in rows that are not agreed; the others' stay."""
        self.prepared: set[tuple[int, ...]] = set()
        """Shapes of requests whose fallback is compiled."""


def similarity_threshold(share: np.ndarray | float, alpha: float) -> np.ndarray | float:
    """t = j^alpha, j the expected Jaccard index of two random selections of the same `share` = k/n.

    j = (k/n) / (2 - k/n). The probe heads are trusted where they agree better than this.
    """
    return (share / (2.0 - share)) ** alpha


def mean_jaccard(sets: Bool[Array, "P T"]) -> Float32[Array, ""]:
    """Mean over pairs of heads of |A and B| / |A or B|; 1.0 for a single head."""
    pairs = list(itertools.combinations(range(sets.shape[0]), 2))
    if not pairs:
        return jnp.ones((), jnp.float32)
    ratios = []
    for a, b in pairs:
        both = jnp.sum(sets[a] & sets[b], dtype=jnp.float32)
        either = jnp.sum(sets[a] | sets[b], dtype=jnp.float32)
        ratios.append(both / jnp.maximum(either, 1.0))
    return jnp.mean(jnp.stack(ratios))


def votes(sums: Float32[Array, "P T"], sets: Bool[Array, "P T"]) -> Float32[Array, " T"]:
    """What the probe heads agree on: the number of heads that selected a token, ties by their sums.

    Sums of one head never exceed the number of its queries; they are scaled to below one vote.
    """
    total = jnp.sum(jnp.where(sums > -jnp.inf, sums, 0.0), axis=0)  # [T]
    below_one = total / (jnp.sum(total) + 1.0)
    ballots = jnp.sum(sets, axis=0, dtype=jnp.float32) + below_one
    return jnp.where(sums[0] > -jnp.inf, ballots, -jnp.inf)


def _by_probe(
    qkv: Qkv, q_lengths: Array, probe: Array, num_tokens: Array, limits: Array, *, n: int,
    heads: int, chunk_tokens: int,
) -> TokenSelection:  # fmt: skip
    q, k, _ = qkv
    tokens, heads, group = probe.shape[0], min(heads, q.shape[2]), q.shape[2] // k.shape[2]
    of = np.arange(heads) // group  # one KV head a query head, so that each has sums of its own
    sums = sums_of(q[:, :, :heads], probe[:, of], k[:, :, of], num_tokens, q_lengths)
    each = jnp.broadcast_to(limits[:, None], sums.shape[:2])
    sets = jax.vmap(lambda row, limits: top_mask(row, n, limits))(sums, each)  # [B, P, T]
    scores = jnp.sum(sums, axis=1)
    selected = select_units(jax.vmap(votes)(sums, sets), n, limits, mass=scores)
    counts = chunk_counts(selected.ids, chunk_tokens=chunk_tokens, chunks=tokens // chunk_tokens)
    agree = jax.vmap(mean_jaccard)(sets)
    return TokenSelection(selected.ids, counts, selected.mass, agree, importance_of(scores))


def _by_heads_of(target: Target) -> Callable[..., TokenSelection]:
    def by_heads(
        qkv: Qkv, q_lengths: Array, pages: Array, key_slots: Array, num_tokens: Array,
        limits: Array, trusted: TokenSelection, agreed: Array, *, n: int,
    ) -> TokenSelection:  # fmt: skip
        q, k, _ = qkv
        rows, heads = k.shape[0], k.shape[2]
        sums = sums_of(
            q, keys_of(pages, key_slots, k, target), k, num_tokens, q_lengths
        )  # [B, K, T]
        flat = sums.reshape(rows * heads, -1)
        selected = select_units(flat, n, jnp.repeat(limits, heads))  # [B*K, n]
        counts = chunk_counts(selected.ids, chunk_tokens=pages.shape[3], chunks=key_slots.shape[0])
        counts = jnp.mean(counts.reshape(rows, heads, -1).astype(jnp.float32), axis=1)
        held = jnp.sum(selected.attention.reshape(rows, -1), axis=1)
        scores = jnp.sum(sums, axis=1)
        total = jnp.sum(jnp.where(scores > -jnp.inf, scores, 0.0), axis=1)
        mass = held / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        ids = selected.ids.reshape(rows, heads, n)
        return TokenSelection(
            jnp.where(agreed[:, None, None], trusted.ids[:, None], ids),
            jnp.where(agreed[:, None], trusted.counts.astype(jnp.float32), counts),
            jnp.where(agreed, trusted.mass, mass),
            trusted.similarity,
            importance_of(scores),
        )

    return by_heads
