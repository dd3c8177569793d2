"""The jitted calls that bring probe keys out of the page pool: there they lie in slots of packs."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from ckv_jax.kernels_pallas.gather.api import gather
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.shardings import PAGES, PROBE, WHOLE
from ckv_jax.pipeline.layers import Layers, Pages
from ckv_jax.prefix.pools import as_bits
from ckv_jax.storage.layout import Layout


class ProbeKeys:
    """Jitted calls over the pool of one model."""

    def __init__(self, layers: Layers) -> None:
        self._dtype = layers.dtype
        jit, split = layers.programs.jit, layers.split
        bring = layers.once(_bring_of, layers.target)
        self._bring = jit(
            split(bring, (PAGES, WHOLE, WHOLE), PROBE), static=("heads", "dim", "most", "dtype")
        )
        self._merge = jit(split(_merged, (PROBE, PROBE, WHOLE), PROBE))

    def bring(
        self,
        pages: Pages,
        slots: Int32[np.ndarray, " N"],
        place: Int32[np.ndarray, " M"],
        layout: Layout,
    ) -> Float[Array, "T H D"]:
        """The keys of M chunks, T = M * C: chunk m is at `place[m]` of the pages in `slots`.

        Chunks whose place is -1, or whose page has no slot, are zeros.
        """
        heads = None if layout.probe == "keys" else layout.probe_heads
        key = (pages.shape, slots.shape, place.shape, heads)
        out: Array = self._bring(
            key, pages, slots, place, heads=heads, dim=layout.head_dim,
            most=layout.probe_page_chunks, dtype=self._dtype,
        )  # fmt: skip
        return out

    def merge(
        self, first: Float[Array, "T H D"], second: Float[Array, "T H D"], cut: int
    ) -> Float[Array, "T H D"]:
        """The tokens of `first` before `cut`, those of `second` from there on."""
        out: Array = self._merge(first.shape, first, second, np.int32(cut))
        return out


def _bring_of(target: Target) -> Callable[..., Array]:
    def bring(
        pages: Array, slots: Array, place: Array, *, heads: int | None, dim: int, most: int,
        dtype: jnp.dtype,
    ) -> Array:  # fmt: skip
        chunk, row = pages.shape[-2:]
        held = row // dim if heads is None else heads  # of this device
        size, one = math.prod(pages.shape[1:]), chunk * held * dim  # of a page; of a chunk in it
        page, within = place // most, place % most
        slot = jnp.where(place >= 0, slots[page], -1)
        if target.platform == "tpu":  # tiles: seen as other rows, the whole pool would be copied
            whole = gather(pages, slots[None], target=target)[0].reshape(len(slots), size)
            rows = whole[:, : most * one].reshape(-1, one)
            table = jnp.where(slot >= 0, place, -1)[:, None]
        else:
            unit = math.gcd(size, one)
            rows = pages.reshape(-1, unit)
            first = slot * (size // unit) + within * (one // unit)
            step = jnp.arange(one // unit, dtype=jnp.int32)
            table = jnp.where(slot[:, None] >= 0, first[:, None] + step[None], -1)
        keys = gather(rows, table, target=target)  # [M, one // unit, unit]
        return as_bits(keys.reshape(-1, held, dim), dtype)

    return bring


def _merged(first: Array, second: Array, cut: Array) -> Array:
    before = jnp.arange(first.shape[0]) < cut
    return jnp.where(before[:, None, None], first, second)
