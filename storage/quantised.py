"""Codecs that round keys and values: 8, 4 or 2 bits each, a scale and a zero a token and KV head.

KIVI's asymmetric rounding with groups of one token and head (`scale = (max - min) / (2^bits - 1)`,
`zero = min`), keys and values apart as KVTuner found they should be; keys turned by a Hadamard
matrix before they are rounded (SAW-INT4). Scale and zero are bfloat16, rounded so that they still
cover the row: what is read back is within half a scale of what was written, and then rounded to
the layout's element type.

Bytes of one pack, little-endian, in this order; no part is padded but the whole, at its end:

    bfloat16 [pl, 2, C, K, 2]: scale, zero
    then for each layer
        its keys, uint8 [C, K, D * bits / 8]
        its values, the same with their own bits

A byte of 4 or 2 bits each holds dims d, d + D/2 or d, d + D/4, d + D/2, d + 3D/4, the first one in
the lowest bits. With K and V apart a pack has one kind and one layer.

Products of a code, or of a sum of turned ones, and a bfloat16 scale have fewer than 24 bits, and
blocks of Hadamard matrices are powers of four wide, so that all of them are exact in float32 and
every device reads back the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import ml_dtypes
import numpy as np

from ckv_jax.storage.layout import Layout

ALIGN = 512
"""What encoded packs are a multiple of: what most disks read directly."""
BITS = (8, 4, 2)
"""What a key or a value can be rounded to."""
_WIDEST = 64  # dims that are turned together
_TINY = np.float32(2.0**-126)  # what devices do not take for zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """A codec of `(bits of keys, bits of values)`, one pair for all layers or one for each.

    Raises ValueError for other bits, and from `num_bytes` for layouts that it does not suit. A row
    with a value that is not finite is read back as NaNs.
    """

    name: str
    bits: tuple[tuple[int, int], ...]
    turned: bool = False
    """Whether keys are turned by a Hadamard matrix in blocks of dims before they are rounded."""
    version: int = 1

    def __post_init__(self) -> None:
        if not self.bits or any(b not in BITS for pair in self.bits for b in pair):
            raise ValueError(f"{self.name}: got bits {self.bits}, expected pairs of {BITS}")

    # -- the seam --------------------------------------------------------------------------------

    def num_bytes(self, layout: Layout) -> int:
        """Bytes of one pack of the layer group that takes most."""
        if len(self.bits) not in (1, layout.num_layers):
            raise ValueError(
                f"{self.name}: got bits of {len(self.bits)} layers, expected {layout.num_layers}"
            )
        if not layout.kv_together and (self.turned or any(k != v for k, v in self.bits)):
            raise ValueError(f"{self.name}: got keys and values in packs of their own")
        parts = 8 // min(self._widths)
        if layout.head_dim % parts:
            raise ValueError(
                f"{self.name}: got head_dim {layout.head_dim}, expected a multiple of {parts}"
            )
        most = max(self._size(layout, group) for group in range(layout.groups))
        return -(-most // ALIGN) * ALIGN

    def of_group(self, group: int, layout: Layout) -> Quantised:
        """The codec of one layer group's packs: itself, or one with the bits of their layers."""
        if len(self.bits) == 1:
            return self
        mine = tuple(self.bits_of(layer) for layer in layout.group_layers(group))
        mine += mine[-1:] * (layout.pack_layers - len(mine))  # layers that are not there
        return replace(self, bits=mine)

    def encode(self, packs: np.ndarray, layout: Layout) -> np.ndarray:
        """See `Codec`."""
        out = np.zeros((len(packs), self.num_bytes_of(layout)), np.uint8)
        for row, pack in zip(out, packs, strict=True):  # one after the other: they fit a cache
            self._encode(pack, row, layout)
        return out

    def _encode(self, pack: np.ndarray, out: np.ndarray, layout: Layout) -> None:
        """One pack [*pack_shape] into `out` uint8 [num_bytes]."""
        if layout.dtype == "bfloat16":  # several times as fast
            x = (pack.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            x = pack.astype(np.float32)
        bits = self._rows(layout)
        levels = np.array([[2**b - 1 for b in pair] for pair in bits], np.float32)
        levels = levels[:, : x.shape[1], None, None]  # [pl, kinds, 1, 1]
        with np.errstate(invalid="ignore", over="ignore"):
            if self.turned:
                wide = _block(layout.head_dim)
                keys = _turned(x[:, 0].reshape(-1, wide)) / np.float32(math.sqrt(wide))
                x[:, 0] = keys.reshape(x[:, 0].shape)
            zero = _downward(x.min(-1))
            scale = _upward((x.max(-1) - zero) / levels)
            lost = ~np.isfinite(scale)
            zero[lost], scale[lost] = 0, np.nan
            x -= zero[..., None]
            x /= np.where(scale > 0, scale, np.float32(1))[..., None]
            np.rint(x, out=x)
        x[lost] = 0
        codes = x.astype(np.uint8)
        both = np.stack([scale, zero], -1).astype(ml_dtypes.bfloat16)  # exact
        at = both.nbytes
        out[:at] = both.reshape(-1).view(np.uint8)
        for layer, pair in zip(codes, bits, strict=True):
            for kind, width in zip(layer, pair, strict=False):
                part = _narrow(kind, width).reshape(-1)
                out[at : at + len(part)] = part
                at += len(part)

    def decode(self, stored: Any, layout: Layout) -> Any:
        """See `Codec`: arrays of numpy's or of JAX's, in and out."""
        xp = stored.__array_namespace__()
        layers, kinds, chunk, heads, dim = layout.pack_shape
        at = 4 * layers * kinds * chunk * heads
        both = stored[:, :at].view(ml_dtypes.bfloat16)
        both = both.reshape(-1, layers, kinds, chunk, heads, 2).astype(np.float32)
        scale, zero = both[..., :1], both[..., 1:]
        runs = []
        for count, pair in self._runs(layout):
            sizes = [chunk * heads * dim * bits // 8 for bits in pair[:kinds]]
            run = stored[:, at : at + count * sum(sizes)]
            at += count * sum(sizes)
            if len(set(pair[:kinds])) == 1:
                shape = (-1, count, kinds, chunk, heads, sizes[0] // (chunk * heads))
                runs.append(_wide(xp, run.reshape(shape), pair[0]))
                continue
            run = run.reshape(-1, count, sum(sizes))
            parts = (run[..., : sizes[0]], run[..., sizes[0] :])
            wide = [
                _wide(xp, part.reshape(-1, count, 1, chunk, heads, dim * bits // 8), bits)
                for part, bits in zip(parts, pair, strict=True)
            ]
            runs.append(xp.concatenate(wide, axis=2))
        codes = runs[0] if len(runs) == 1 else xp.concatenate(runs, axis=1)
        if not self.turned:
            return (codes.astype(np.float32) * scale + zero).astype(layout.numpy_dtype)
        block = _block(dim)
        root = np.float32(math.sqrt(block))
        first = (np.arange(block) == 0).astype(np.float32) * root  # ones, turned
        first = first.reshape(1, 1, 1, 1, 1, block)
        keys = codes[:, :, 0].reshape(-1, layers, chunk, heads, dim // block, block)
        keys = _turn(keys, block) * (scale[:, :, 0, ..., None] / root)
        keys = (keys + zero[:, :, 0, ..., None] * first).reshape(-1, layers, chunk, heads, dim)
        values = codes[:, :, 1].astype(np.float32) * scale[:, :, 1] + zero[:, :, 1]
        both = [x.astype(layout.numpy_dtype) for x in (keys, values)]
        return xp.stack(both, axis=2)

    def bits_of(self, layer: int) -> tuple[int, int]:
        """Bits of the keys and of the values of a layer."""
        return self.bits[layer if len(self.bits) > 1 else 0]

    # -- sizes -----------------------------------------------------------------------------------

    def num_bytes_of(self, layout: Layout) -> int:
        """Bytes of a pack in `layout`, which may be padded for the sake of other groups."""
        return layout.codec_bytes or self.num_bytes(layout)

    @property
    def _widths(self) -> list[int]:
        return [bits for pair in self.bits for bits in pair]

    def _rows(self, layout: Layout) -> tuple[tuple[int, int], ...]:
        """Bits of each layer of a pack, of a codec of one group."""
        return self.bits * layout.pack_layers if len(self.bits) == 1 else self.bits

    def _runs(self, layout: Layout) -> list[tuple[int, tuple[int, int]]]:
        """(layers, bits) of neighbours with the same bits."""
        return [(len(list(run)), pair) for pair, run in groupby(self._rows(layout))]

    def _size(self, layout: Layout, group: int) -> int:
        rows = layout.chunk_tokens * layout.num_kv_heads  # of one layer's keys or values
        kinds = layout.pack_shape[1]
        bits = [b for pair in self.of_group(group, layout)._rows(layout) for b in pair[:kinds]]
        return sum(rows * (4 + layout.head_dim * b // 8) for b in bits)


def _block(dim: int) -> int:
    """Dims that are turned together: the largest power of four up to 64 that divides `dim`."""
    wide = 1
    while wide < _WIDEST and dim % (4 * wide) == 0:
        wide *= 4
    return wide


def _hadamard(wide: int) -> np.ndarray:
    """float32 [wide, wide] of 1 and -1; symmetric, its square is `wide` times the identity."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < wide:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _turned(x: np.ndarray) -> np.ndarray:
    """float32 [n, wide] times the Hadamard matrix; by sums, as BLAS's threads cost much more."""
    rows = np.ascontiguousarray(x.T)
    step = 1
    while step < x.shape[1]:
        pairs = rows.reshape(-1, 2, step, len(x))
        rows = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        step *= 2
    return rows.reshape(x.shape[::-1]).T


def _turn(codes: Any, wide: int) -> Any:
    """float32 [..., wide]: codes uint8 [..., wide] times the Hadamard matrix, exactly."""
    if isinstance(codes, np.ndarray):
        return _turned(codes.reshape(-1, wide).astype(np.float32)).reshape(codes.shape)
    import jax  # only here: a caller with an array of JAX's has it

    matrix = _hadamard(wide).astype(ml_dtypes.bfloat16)  # as are codes: no bit is lost
    return jax.numpy.matmul(
        codes.astype(ml_dtypes.bfloat16), matrix, preferred_element_type=np.float32
    )


def _narrow(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., D * bits / 8] from codes uint8 [..., D]."""
    parts = np.split(codes, 8 // bits, axis=-1)
    out = parts[0].copy()
    for place, part in enumerate(parts[1:], 1):
        out |= part << np.uint8(place * bits)
    return out


def _wide(xp: Any, data: Any, bits: int) -> Any:
    """Codes uint8 [..., D] from uint8 [..., D * bits / 8]."""
    if bits == 8:
        return data
    mask = np.uint8(2**bits - 1)
    parts = [(data >> np.uint8(place)) & mask for place in range(0, 8, bits)]
    return xp.concatenate(parts, axis=-1)


def _downward(x: np.ndarray) -> np.ndarray:
    """The bfloat16 below float32 `x`, as float32."""
    bits = x.view(np.uint32)
    low = bits & np.uint32(0xFFFF0000)
    low += np.where((bits != low) & (x < 0), np.uint32(0x10000), np.uint32(0))
    return low.view(np.float32)


def _upward(x: np.ndarray) -> np.ndarray:
    """The bfloat16 above float32 `x` >= 0, as float32: normal, or zero."""
    bits = x.view(np.uint32)
    high = bits & np.uint32(0xFFFF0000)
    high += np.where(bits != high, np.uint32(0x10000), np.uint32(0))
    found = high.view(np.float32)
    return np.where(x > 0, np.maximum(found, _TINY), found)
