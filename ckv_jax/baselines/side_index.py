"""What a system's index has beside the digest, made of a prefix's packs.

The papers make it in their prefill. Here it is made when a prefix is first generated over, from
what is stored, and stays in memory beside all budgets, for the engine's latest prefixes. One layer
of the prefix is read at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from ckv_jax.baselines.decoding import SelectFirst
from ckv_jax.decode.eviction import Keep
from ckv_jax.decode.selection import DecodeContext, DecodeSelections
from ckv_jax.errors import CkvError
from ckv_jax.model.config import ModelConfig
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.storage.digest import as_float32
from ckv_jax.storage.layout import PLAIN

T = TypeVar("T")

MOST = 32
"""Prefixes whose index is kept beside those in use."""

Make = Callable[[ModelConfig, OpenPrefix, int, np.ndarray, np.ndarray], T]
"""(model, prefix, layer, keys, values float32 [M, C, K, D] as stored, 0 past the last token) ->
index."""


class SideIndex(Generic[T]):
    """Indices by prefix, one for each layer. Engine thread only."""

    def __init__(self, make: Make[T], config: ModelConfig) -> None:
        self._make = partial(make, config)
        self._known: OrderedDict[tuple[str, ...], list[T]] = OrderedDict()

    def of(self, opened: OpenPrefix) -> list[T]:
        """The index of every layer. Raises `RecoveryNeeded` where a pack has to be computed again
        first."""
        segments = [span.segment_id for span in opened.prefix.spans]  # each has its own clusters
        name = opened.prefix.id, str(opened.probe_chunks), *segments  # it is as long as the probe
        if name not in self._known:
            layers = range(opened.prefix.layout.num_layers)
            found = [self._make(opened, layer, *_read(opened, layer)) for layer in layers]
            self._known[name] = found
        self._known.move_to_end(name)
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        return self._known[name]


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
        found = [(on, self._index.of(on.opened)) for on in self._by_prefix]
        at = {int(place): layers for on, layers in found for place in on.rows[: len(on.selectors)]}
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


def indexed(
    kind: type[Indexed[T]], *, keep: Keep, make: Make[T]
) -> Callable[[DecodeContext], DecodeSelections]:
    """For `OwnParts.decoding`: batches of one kind, whose indices the engine keeps."""

    def selections(context: DecodeContext) -> DecodeSelections:
        index = SideIndex(make, context.runtime.layers.config)
        return DecodeSelections(context, partial(kind, keep=keep, index=index))

    return selections


def _read(opened: OpenPrefix, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of one layer, whose heads have packs of their own."""
    layout = opened.prefix.layout
    if not layout.heads_apart or layout.pack_layers != 1 or layout.codec != PLAIN:
        raise ValueError("got packs of several heads or layers, expected one head of one layer")
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
        heads.append(as_float32(packs.view(layout.disk_dtype), layout)[:, 0, :, :, 0])
    kinds = np.stack(heads, axis=3)  # [M, 2, C, K, D]
    return kinds[:, 0], kinds[:, 1]
