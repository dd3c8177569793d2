# mypy: disallow-untyped-calls=False
"""Blocks of keys in a GPU's shared memory, ready for WGMMA, from each kind of probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ckv_jax.kernels_pallas.score.probe import Int4Keys, Int8Keys, Keys, PqKeys, TokenProbe

__all__ = ["KeyBlocks", "key_blocks"]

_SUBSPACES = 16  # whose codebooks, 8 KiB each, fit into shared memory
_STRIP = 32  # columns of one-hot codes made at a time
_PAIR = 16  # dims of the two sub-vectors that one product-quantisation matmul decodes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlocks:
    """How a kernel loads and decodes one probe; `refs` are the operands, `scratch` as listed.

    prepare(refs, scratch, head, barrier) starts `prepared` copies, once a thread block;
    load(refs, scratch, head, first, slot, barrier) starts `loaded` copies of the keys from
    `first` on; decode(scratch, slot) gives references to parts of keys [keys, D / parts], side by
    side, and their scales or None.
    """

    operands: tuple[Array, ...]
    scratch: tuple[Any, ...]
    transforms: tuple[Any, ...]
    loaded: int
    prepared: int
    prepare: Callable[[Sequence[Any], Sequence[Any], Array, Any], None]
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
        case PqKeys():
            return _product(probe, dtype, keys, steps)


def _swizzled(width: int) -> tuple[Any, ...]:
    """The layout WGMMA wants of 16-bit operands, in tiles `width` elements wide."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)


def _nothing(refs: Sequence[Any], scratch: Sequence[Any], head: Array, barrier: Any) -> None:
    pass


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
        prepared=0,
        prepare=_nothing,
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
        prepared=0,
        prepare=_nothing,
        load=load,
        decode=decode,
    )


def _product(probe: PqKeys, dtype: Any, keys: int, steps: int) -> KeyBlocks:
    """Decodes by matmul: one-hot codes [keys, 256] times a codebook [256, 16], whose other half
    of columns is zero, so that two sub-vectors fill one tile.
    """
    kv_heads, subspaces, size, width = probe.codebooks.shape
    if 2 * width != _PAIR or subspaces % 2 or subspaces > _SUBSPACES:
        raise NotImplementedError(
            f"got {subspaces} sub-vectors of {width} dims, expected an even number up to "
            f"{_SUBSPACES}, of 8 dims"
        )
    books = jnp.zeros((kv_heads, subspaces // 2, 2, size, 2, width), dtype)
    halves = probe.codebooks.astype(dtype).reshape(kv_heads, subspaces // 2, 2, size, width)
    for i in range(2):
        books = books.at[:, :, i, :, i].set(halves[:, :, i])
    books = books.reshape(kv_heads, subspaces, size, _PAIR)

    def prepare(refs: Sequence[Any], scratch: Sequence[Any], head: Array, on: Any) -> None:
        for m in range(subspaces):
            plgpu.copy_gmem_to_smem(refs[1].at[head, m], scratch[1].at[m], on)

    def load(
        refs: Sequence[Any],
        scratch: Sequence[Any],
        head: Array,
        first: Array,
        slot: Array | int,
        on: Any,
    ) -> None:
        plgpu.copy_gmem_to_smem(refs[0].at[head, :, pl.ds(first, keys)], scratch[0].at[slot], on)

    def decode(scratch: Sequence[Any], slot: Array) -> tuple[list[Any], None]:
        codes, book, one_hot, decoded = scratch

        def decode_pair(pair: Array, carry: None) -> None:
            def dot(acc_ref: Any) -> Any:
                for i in range(2):
                    code = codes[slot, 2 * pair + i].astype(jnp.int32)
                    for first in range(0, size, _STRIP):  # all at once would not fit registers
                        entry = lax.broadcasted_iota(jnp.int32, (keys, _STRIP), 1) + first
                        hit = entry == lax.broadcast_in_dim(code, entry.shape, (0,))
                        strip = jnp.where(hit, 1.0, 0.0).astype(dtype)
                        one_hot[:, pl.ds(first, _STRIP)] = strip
                    plgpu.commit_smem()
                    plgpu.wgmma(acc_ref, one_hot, book.at[2 * pair + i])
                    plgpu.wgmma_wait(0)
                return acc_ref[...]

            part = pl.run_scoped(dot, plgpu.WGMMAAccumulatorRef((keys, _PAIR), jnp.float32))
            decoded[pair] = part.astype(dtype)

        lax.fori_loop(0, subspaces // 2, decode_pair, None)  # unrolled, it would not fit registers
        plgpu.commit_smem()
        return [decoded.at[pair] for pair in range(subspaces // 2)], None

    return KeyBlocks(
        operands=(probe.codes.transpose(1, 2, 0), books),
        scratch=(
            plgpu.SMEM((steps, subspaces, keys), jnp.uint8),
            plgpu.SMEM((subspaces, size, _PAIR), dtype, transforms=_swizzled(_PAIR)),
            plgpu.SMEM((keys, size), dtype, transforms=_swizzled(_PAIR)),
            plgpu.SMEM((subspaces // 2, keys, _PAIR), dtype, transforms=_swizzled(_PAIR)),
        ),
        transforms=_swizzled(_PAIR),
        loaded=1,
        prepared=subspaces,
        prepare=prepare,
        load=load,
        decode=decode,
    )
