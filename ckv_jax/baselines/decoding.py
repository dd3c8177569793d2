"""What published systems of decode share, in place of the core's (`decode/selection.py`).

All but KVDrive read packs once every row has selected. Their windows keep by age or by use, or keep
nothing between tokens. Some have an index beside the digest. The papers make it in their prefill.
Here it is made of a prefix's packs when it is first generated over, one layer at a time, and stays
in memory for the latest prefixes, in as many bytes as digests may take beside them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from ckv_jax.buckets import bucket
from ckv_jax.config import SystemConfig
from ckv_jax.decode.selection import DecodeSelection, DecodeSelections, Extend
from ckv_jax.decode.token import DecodeContext
from ckv_jax.decode.window import Keep, StepSelection, WindowArrays
from ckv_jax.errors import CkvError
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Layer
from ckv_jax.pipeline.layers import LayerKv, LayerState, Seen, extend_of
from ckv_jax.pipeline.plan import Step
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.selection.select import Always, Ends, Select
from ckv_jax.storage.digest import as_float32
from ckv_jax.storage.layout import PLAIN, TOGETHER, Layout

T = TypeVar("T")

Make = Callable[[ModelConfig, OpenPrefix, int, np.ndarray, np.ndarray], T]
"""(model, prefix, layer, keys, values float32 [M, C, K, D] as stored, 0 past the last token) ->
index."""

ENDS = Ends(first=4, last=64)
"""Sink tokens and local ones that every sparse system attends to beside its budget (KVDrive §9.1).
Whole chunks are kept: 4 to 32 tokens at the beginning, at the end 64 and what shares a chunk with
them."""


@dataclass(frozen=True, slots=True)
class HalfLocal:
    """The ends, and before the last of them half of the budget's chunks."""

    def most(self, layout: Layout, tokens: int) -> int:
        """The ends alone: the other half is within the budget."""
        return ENDS.most(layout, tokens)

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> Array:  # fmt: skip
        ends = ENDS.chunks(scores, probes, num_tokens, num_chunks, limits, chunk_tokens)
        chunk = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
        within = chunk < jnp.broadcast_to(num_chunks, limits.shape)[:, None]
        budget = limits - jnp.sum(ends & within, axis=1, dtype=jnp.int32)
        first = (jnp.broadcast_to(num_tokens, limits.shape) - ENDS.last) // chunk_tokens
        local = (chunk >= (first - budget // 2)[:, None]) & (chunk < first[:, None])
        held: Array = ends | local
        return held


def in_every_layer(name: str, **fields: Any) -> SystemConfig:
    """A system whose layers have packs and selections of their own, at every token; if `fields` say
    nothing else, beside `ENDS` and in a window of one selection."""
    shared: dict[str, Any] = {"decode": Select(), "always": ENDS, "window": 1}
    return SystemConfig(name=name, pack_layers=1, period=1, subperiod=1, **(shared | fields))


def heads_apart(layout: Layout, num_heads: int) -> Layout:
    """Each KV head has packs of its own, and selects by its own queries."""
    if layout.digest == "none":
        raise ValueError("got packs of one head without a digest, expected one")
    return replace(layout, heads_apart=True)


def clusters(layout: Layout, num_heads: int) -> Layout:
    """As `heads_apart`, of tokens whose keys are alike to a layer's KV head (KVDrive §4). A text's
    first 16 and last 64 tokens are in chunks of their own."""
    if layout.digest not in ("means", "means+cosines") or layout.chunk_tokens % TOGETHER:
        raise ValueError(
            f"got digest={layout.digest!r} and chunk_tokens={layout.chunk_tokens}, expected mean "
            f"keys and a multiple of {TOGETHER}"
        )
    return replace(layout, heads_apart=True, grouping="alike")


def decoding(made: type[DecodeSelection], **fields: Any) -> partial[DecodeSelections]:
    """For `OwnParts.decoding`: batches of one kind, with what it takes beside a context."""
    return partial(DecodeSelections, made=partial(made, **fields))


class SelectFirst(DecodeSelection):
    """All rows of a period select before packs are read for any."""

    looks_up = False

    def _demand_all(self, period: int) -> None:
        for call in self._calls[period]:
            assert call.found is not None
            call.found.record.block_until_ready()
        super()._demand_all(period)


class HoldNothing(SelectFirst):
    """Nothing stays on the device between tokens but what the caches keep."""

    def begin(self, batch: int) -> None:
        """Windows begin empty, see `DecodeSelection.begin`."""
        for selector in self.rows.values():
            selector.window.forget()
        super().begin(batch)

    def _collect(self, period: int) -> None:
        empty = self._on_device[period]
        super()._collect(period)
        self._on_device[period] = empty


class Guessed(SelectFirst):
    """What enters a period selects for the next one, whose packs are read while this one computes.

    Of earlier tokens the scores of their guesses count (`Select.queries`).
    """

    _guessed: int | None = None
    """The period whose packs are being read."""

    def begin(self, batch: int) -> None:
        """No period is guessed, see `DecodeSelection.begin`."""
        self._guessed = None
        super().begin(batch)

    def dispatched(self, period: int) -> None:
        """Starts reading what the next period attends to."""
        if period + 1 < self._plan.periods:
            try:
                super()._demand_all(period + 1)
            except BaseException:
                self.release()
                raise
            self._guessed = period + 1

    def score(self, period: int, hidden: Array, starts: ArrayLike) -> None:
        if self._guessed != period:
            super().score(period, hidden, starts)
        if period + 1 < self._plan.periods:
            super().score(period + 1, hidden, starts)

    def _demand_all(self, period: int) -> None:
        if self._guessed != period:
            super()._demand_all(period)


def lru(now: Array, window: WindowArrays, selection: StepSelection) -> Array:
    """Least recently used first: all are worth the same, so that age decides."""
    return jnp.zeros_like(now)


def lfu(now: Array, window: WindowArrays, selection: StepSelection) -> Array:
    """Least frequently used since it came first; of equals the least recently used."""
    return window.uses.astype(jnp.float32)


class SideIndex(Generic[T]):
    """Indices by prefix, one for each layer, of at most `EngineConfig.digest_bytes` beside those in
    use. Engine thread only."""

    def __init__(self, make: Make[T], context: DecodeContext) -> None:
        layout = context.runtime.layout
        if layout.pack_layers != 1 or not layout.kv_together or layout.codec != PLAIN:
            raise ValueError(
                f"{context.runtime.system.name}: got packs of {layout.pack_layers} layers with "
                f"codec {layout.codec!r}, expected keys and values of one layer without a codec: "
                "an index is made of them"
            )
        self._make = partial(make, context.runtime.layers.config)
        self._most = context.runtime.prefixes.digest_budget
        self._known: OrderedDict[tuple[str, ...], list[T]] = OrderedDict()

    def of(self, sources: Sequence[OpenPrefix]) -> list[list[T]]:
        """The index of every layer of each prefix. Raises `RecoveryNeeded` where a pack has to be
        computed again first."""
        names = []
        for opened in sources:
            segments = [
                span.segment_id for span in opened.prefix.spans
            ]  # each has its own clusters
            name = opened.prefix.id, str(opened.probe_chunks), *segments  # as long as the probe
            if name not in self._known:
                layers = range(opened.prefix.layout.num_layers)
                found = [self._make(opened, layer, *_read(opened, layer)) for layer in layers]
                self._known[name] = found
            self._known.move_to_end(name)
            names.append(name)
        over = sum(part.nbytes for part in jax.tree.leaves([*self._known.values()])) - self._most
        for name in list(self._known):
            if over > 0 and name not in names:
                over -= sum(part.nbytes for part in jax.tree.leaves(self._known.pop(name)))
        return [self._known[name] for name in names]


class Indexed(SelectFirst, Generic[T]):
    """Selects as `SelectFirst`, and has an index of every prefix beside the digest."""

    def __init__(self, context: DecodeContext, *, keep: Keep, index: SideIndex[T]) -> None:
        super().__init__(context, keep=keep)
        self._index = index
        self._indices: list[list[tuple[T, ...]]] = []
        """By period and call, of each prefix."""
        self._indexed: object = None
        """The rows that they are of."""

    def begin(self, batch: int) -> None:
        """See `DecodeSelection.begin`; makes the index of prefixes that have none. Raises as
        `SideIndex.of`."""
        super().begin(batch)
        if self._indexed is self._by_prefix:
            return
        found = self._index.of([on.opened for on in self._by_prefix])
        at = {
            int(place): layers
            for on, layers in zip(self._by_prefix, found, strict=True)
            for place in on.rows[: len(on.selectors)]
        }
        self._indices = [
            [
                tuple(
                    at[place][period]
                    for place in np.asarray(call.of.rows).reshape(len(call.of.probes), -1)[:, 0]
                )
                for call in calls
            ]
            for period, calls in enumerate(self._calls)
        ]
        self._indexed = self._by_prefix


class Predicted(Indexed[Keys], Guessed):
    """Keys of the index are scored in place of the digest."""

    def begin(self, batch: int) -> None:
        super().begin(batch)
        for calls, indices in zip(self._calls, self._indices, strict=True):
            for call, low in zip(calls, indices, strict=True):
                call.of = call.of._replace(probes=tuple((keys,) for keys in low))


def low_rank(
    config: ModelConfig, opened: OpenPrefix, layer: int, keys: np.ndarray, values: np.ndarray, *,
    share: Fraction, each_head: bool = False,
) -> Keys:  # fmt: skip
    """The layer's keys float32 [M, C, K, D] in their best subspace, of all heads together or of
    each, in the layout's dtype. It has that share of the dimensions.

    They are kept as wide as keys are: a product with them is one in the subspace.
    """
    chunks, size, *width = keys.shape
    rows = keys.reshape(chunks * size, width[0] if each_head else 1, -1).swapaxes(0, 1)  # [G, T, W]
    _, basis = np.linalg.eigh(rows.swapaxes(1, 2) @ rows)  # ascending
    basis = basis[:, :, -max(1, round(share * rows.shape[2])) :]
    low = np.zeros((opened.probe_chunks * size, *width), opened.prefix.layout.numpy_dtype)
    found = (rows @ basis) @ basis.swapaxes(1, 2)
    low[: chunks * size] = found.swapaxes(0, 1).reshape(-1, *width)
    return Keys(jnp.asarray(low))


class Selected(NamedTuple):
    """What one call selected for a period's R rows of one prefix, inside a jitted call."""

    q: Array
    """Queries [R, 1, H, D] of the period's first layer."""
    probe: Probe
    """What its chunks are scored by."""
    num_tokens: Array
    num_chunks: Array
    limits: Array
    """int32 [R]; 0: padding."""
    scores: Array
    """float32 [R, J, M]: J rows where each head selects for itself."""
    ids: Array
    """int32 [R, J, n], -1: none."""


class Setting(NamedTuple):
    """What of an engine an addition depends on."""

    config: ModelConfig
    always: Always
    chunk_tokens: int
    target: Target


class OwnAttention(Indexed[T]):
    """A layer attends to its selection in a way of its own, by what its index adds to it."""

    def __init__(
        self, context: DecodeContext, *, keep: Keep, index: SideIndex[T],
        add: Callable[[Selected, T, Setting], Any], see: Callable[[Seen, Any, DTypeLike], Seen],
    ) -> None:  # fmt: skip
        """`add`: the addition of some rows, arrays [R, ...]; `see`: what is attended to with it."""
        super().__init__(context, keep=keep, index=index)
        runtime = context.runtime
        self._layers = layers = runtime.layers
        self._added: Any = None
        setting = Setting(
            layers.config, runtime.system.always, runtime.system.chunk_tokens, layers.target
        )
        jit, once = layers.programs.jit, layers.once
        self._add = jit(once(_add_of, add, layers.layer_of, setting))
        self._extended = jit(
            once(extend_of, layers.layer_of, layers.target, see),
            static=("context", "selections"), donate=("buffers",),
        )  # fmt: skip

    def nothing(self, rows: int, columns: int) -> Any:
        """The addition [rows, ...] of rows that select nothing; others select `columns` chunks at
        most."""
        raise NotImplementedError

    def select(
        self, period: int, hidden: Array, starts: np.ndarray, tables: np.ndarray
    ) -> np.ndarray:
        """See `DecodeSelection.select`; makes the addition as well."""
        tables = super().select(period, hidden, starts, tables)
        width = bucket(self.widest)
        lengths = tables[-self._plan.selections_per_period :]
        if not lengths[:, :, width:].any():  # every column costs an addition
            tables = tables[:, :, :width]
        columns = tables.shape[2] or self._columns  # no table: windows do not hold
        added = self.nothing(len(hidden), columns)
        for call, index in zip(self._calls[period], self._indices[period], strict=True):
            assert call.found is not None
            of, scores, record = call.of, call.found.scores, call.found.record
            added = self._add(
                of.states[0], hidden, starts, of.rows, tuple(mine[0] for mine in of.probes), index,
                of.num_tokens, of.num_chunks, of.limits, scores, record, added,
            )  # fmt: skip
        self._added = added
        return tables

    def extend(self, step: Step) -> Extend | None:
        assert self._added is not None
        return partial(self._run, self._added)

    def _run(
        self, added: Any, layers: range, hidden: Array, start: ArrayLike, buffers: LayerKv,
        at: ArrayLike, pages: Array, tables: Any, **static: Any,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        """`Layers.extend` of one layer."""
        found: tuple[Array, LayerKv] = self._extended(
            (self._layers.state(layers.start),), hidden, start, buffers, at, pages, tables, added,
            **static,
        )  # fmt: skip
        return found


class Estimate(NamedTuple):
    """Attention of a batch's rows beside their selections, float32."""

    out: Array
    """[B, 1, H, D]"""
    lse: Array
    """[B, 1, H]; -inf where nothing is estimated."""


class Estimating(OwnAttention[Any]):
    """Each layer attends to its selection and to an estimate of all other chunks."""

    def nothing(self, rows: int, columns: int) -> Estimate:
        config = self._layers.config
        shape = rows, 1, config.num_heads, config.head_dim
        return Estimate(jnp.zeros(shape, jnp.float32), jnp.full(shape[:3], -jnp.inf, jnp.float32))


def with_estimate(seen: Seen, added: Any, dtype: DTypeLike) -> Seen:
    """The estimate beside the selection."""
    return seen._replace(beside=[added])


def _add_of(
    add: Callable[[Selected, T, Setting], Any], layer_of: Callable[[LayerState], Layer],
    setting: Setting,
) -> Callable[..., Any]:  # fmt: skip
    def added_by(
        state: LayerState, hidden: Array, start: Array, rows: Array, probes: Sequence[Probe],
        indices: Sequence[T], num_tokens: Array, num_chunks: Array, limits: Array,
        scores: Array, record: Array, added: Any,
    ) -> Any:  # fmt: skip
        """Puts the additions of a call's rows among those of a batch."""
        q = layer_of(state).query(hidden[rows], start[rows][:, None])
        count = (record.shape[1] - 1) // 4  # see `token.Record`, of which ids come first
        scores = scores.reshape(len(rows), -1, scores.shape[1])
        ids = record[:, :count].reshape(len(rows), -1, count)
        size = len(rows) // len(probes)
        for place, (probe, index) in enumerate(zip(probes, indices, strict=True)):
            mine = slice(place * size, (place + 1) * size)
            selected = Selected(
                q[mine], probe, num_tokens[place], num_chunks[place], limits[mine], scores[mine],
                ids[mine],
            )  # fmt: skip
            some = jnp.where(limits[mine] > 0, rows[mine], len(hidden))  # padding is dropped
            added = jax.tree.map(partial(_put, some), added, add(selected, index, setting))
        return added

    return added_by


def _put(rows: Array, whole: Array, part: Array) -> Array:
    """Sets `rows` of an array, of whose other axes the part has the beginning or all."""
    sizes = [min(pair) for pair in zip(whole.shape[1:], part.shape[1:], strict=True)]
    cut = tuple(slice(size) for size in sizes)
    return whole.at[(rows, *cut)].set(part[(slice(None), *cut)], mode="drop")


def indexed(
    kind: Callable[..., Indexed[T]], selections: type[DecodeSelections] = DecodeSelections, *,
    make: Make[T], **fields: Any,
) -> Callable[[DecodeContext], DecodeSelections]:  # fmt: skip
    """As `decoding`, with indices that the engine keeps."""

    def of(context: DecodeContext) -> DecodeSelections:
        return selections(context, partial(kind, index=SideIndex(make, context), **fields))

    return of


def _read(opened: OpenPrefix, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of one layer."""
    layout = opened.prefix.layout
    every = np.arange(opened.num_chunks)
    heads = []
    for group in range(layer * layout.parts, (layer + 1) * layout.parts):
        packs = np.empty((len(every), *layout.pack_shape), layout.numpy_dtype)
        try:
            bad = np.flatnonzero(~opened.reader.read_packs(group, every, packs))
        except CkvError:
            bad = every  # a fault is a miss
        if len(bad):
            packs[bad] = opened.recovered.packs(group, bad)
        heads.append(as_float32(packs.view(layout.disk_dtype), layout)[:, 0])
    kinds = np.concatenate(heads, axis=3)  # [M, 2, C, K, D]
    return kinds[:, 0], kinds[:, 1]
