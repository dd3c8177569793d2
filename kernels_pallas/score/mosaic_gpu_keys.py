# mypy: disallow-untyped-calls=False
"""Blocks of keys in a GPU's shared memory, ready for WGMMA, from each kind of probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ckv_jax.kernels_pallas.score.probe import Int4Keys, Int8Keys, Keys, PqKeys, TokenProbe

__all__ = ["KeyBlocks", "key_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlocks:
    """How a kernel loads and decodes one probe; `refs` are the operands, `scratch` as listed.

    load(refs, scratch, head, first, slot, barrier) starts `loaded` copies of the keys from
    `first` on; decode(scratch, slot) gives references to parts of keys [keys, D / parts], side by
    side, and their scales or None.
    """

    operands: tuple[Array, ...]
    scratch: tuple[Any, ...]
    transforms: tuple[Any, ...]
    loaded: int
    load: Callable[[Sequence[Any], Sequence[Any], Array, Array, Array | int, Any], None]
    decode: Callable[[Sequence[Any], Array], tuple[list[Any], Array | None]]

    @property
    def nbytes(self) -> int:
        """Bytes of the operands."""
        return sum(x.size * x.dtype.itemsize for x in self.operands)


def key_blocks(probe: TokenProbe, dtype: Any, keys: int, steps: int) -> KeyBlocks:
    """The plan for `probe`; keys come out in `dtype`."""
    match probe:
        case Keys():
            return _full(probe, dtype, keys, steps)
        case Int8Keys():
            return _scaled(probe, dtype, keys, steps, _int8)
        case Int4Keys():
            return _scaled(probe, dtype, keys, steps, _int4)
        case PqKeys():  # a kernel that decoded by matmul took 4.6 times as long on an H200
            raise NotImplementedError(
                "got product-quantised keys, which the reference scores sooner"
            )


def _swizzled(width: int) -> tuple[Any, ...]:
    """The layout WGMMA wants of 16-bit operands, in tiles `width` elements wide."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)


def _full(probe: Keys, dtype: Any, keys: int, steps: int) -> KeyBlocks:
    if probe.keys.dtype != dtype:
        raise NotImplementedError(f"got keys {probe.keys.dtype}, expected {dtype} like q")

    def load(
        refs: Sequence[Any],
        scratch: Sequence[Any],
        head: Array,
        first: Array,
        slot: Array | int,
        on: Any,
    ) -> None:
        plgpu.copy_gmem_to_smem(refs[0].at[pl.ds(first, keys), head, :], scratch[0].at[slot], on)

    return KeyBlocks(
        operands=(probe.keys,),
        scratch=(plgpu.SMEM((steps, keys, probe.shape[2]), dtype, transforms=_swizzled(64)),),
        transforms=_swizzled(64),
        loaded=1,
        load=load,
        decode=lambda scratch, slot: ([scratch[0].at[slot]], None),
    )


def _int8(codes: Array, dtype: Any) -> list[Array]:
    return [codes.astype(dtype)]


def _int4(codes: Array, dtype: Any) -> list[Array]:
    wide = codes.astype(jnp.int32)
    return [((wide & 15) - 8).astype(dtype), ((wide >> 4) - 8).astype(dtype)]


def _scaled(
    probe: Int8Keys | Int4Keys,
    dtype: Any,
    keys: int,
    steps: int,
    unpack: Callable[[Array, Any], list[Array]],
) -> KeyBlocks:
    width, dim = probe.codes.shape[2], probe.shape[2]
    tiled = _swizzled(min(64, width))  # a write of `width` columns is of whole tiles

    def load(
        refs: Sequence[Any],
        scratch: Sequence[Any],
        head: Array,
        first: Array,
        slot: Array | int,
        on: Any,
    ) -> None:
        codes, scales, _ = scratch
        plgpu.copy_gmem_to_smem(refs[0].at[pl.ds(first, keys), head, :], codes.at[slot], on)
        plgpu.copy_gmem_to_smem(refs[1].at[head, pl.ds(first, keys)], scales.at[slot], on)

    def decode(scratch: Sequence[Any], slot: Array) -> tuple[list[Any], Array]:
        codes, scales, decoded = scratch
        for i, part in enumerate(unpack(codes[slot], dtype)):
            decoded[:, pl.ds(i * width, width)] = part
        plgpu.commit_smem()
        return [decoded], scales[slot]

    return KeyBlocks(
        operands=(probe.codes, probe.scale.swapaxes(0, 1)),
        scratch=(
            plgpu.SMEM((steps, keys, width), probe.codes.dtype),
            plgpu.SMEM((steps, keys), jnp.float32),
            plgpu.SMEM((keys, dim), dtype, transforms=tiled),
        ),
        transforms=tiled,
        loaded=2,
        load=load,
        decode=decode,
    )
