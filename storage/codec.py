"""Codecs: encode packs as bytes on disk and decode them; the interface and those provided.

`Quantised` rounds keys and values to 8 or 4 bits each, with a scale and a zero per token and KV
head: KIVI's asymmetric rounding with groups of one token and head (`scale = (max - min) / (2^bits -
1)`, `zero = min`), keys and values apart as KVTuner found they should be. Scale and zero are
bfloat16, rounded so that they still cover the row: what is read back is within half a scale of what
was written, and then rounded to the layout's element type.

Bytes of one pack, little-endian, in this order; no part is padded but the whole, at its end:

    bfloat16 [pl, 2, C, K, 2]: scale, zero
    then for each layer
        its keys, uint8 [C, K, D * bits / 8]
        its values, the same with their own bits

A byte of 4 bits each holds dims d and d + D/2, the first one in the lower bits. With K and V apart
a pack has one kind and one layer. Products of a code and a bfloat16 scale have fewer than 24 bits,
so that they are exact in float32 and every device reads back the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ckv_jax.storage.layout import PLAIN, Layout


class Codec(Protocol):
    """Encodes packs as bytes of a fixed size, and decodes them.

    Name and version are part of a prefix's identity, so that a codec only reads its own bytes.
    """

    @property
    def name(self) -> str:
        """Name of the codec: a-z, 0-9 and hyphens."""

    @property
    def version(self) -> int:
        """Version of the byte format; change it with the format."""

    def num_bytes(self, layout: Layout) -> int:
        """Returns the bytes of one encoded pack; `layout` is that of the packs before encoding."""

    def encode(self, packs: np.ndarray, layout: Layout) -> np.ndarray:
        """Encodes packs [n, *pack_shape] of `layout.numpy_dtype` as uint8 [n, num_bytes]."""

    def decode(self, stored: Any, layout: Layout) -> Any:
        """Decodes uint8 [n, num_bytes] to packs [n, *pack_shape] of `layout.numpy_dtype`, or its
        bit patterns.

        `stored` is a numpy array on the host, or a JAX array that is traced into a call on the
        device.
        """


ALIGN = 512
"""Alignment of encoded packs in bytes, which most disks need for direct I/O."""
BITS = (8, 4)
"""Bits that a key or a value can be quantised to."""
_TINY = np.float32(2.0**-126)  # what devices do not take for zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """A codec that quantises to `bits`: (bits of keys, bits of values), each 8 or 4.

    Raises ValueError for other bits, and in `num_bytes` for unsuitable layouts. A row with a value
    that is not finite is read back as NaNs.
    """

    name: str
    bits: tuple[int, int]
    version: int = 1

    def __post_init__(self) -> None:
        if any(b not in BITS for b in self.bits):
            raise ValueError(f"{self.name}: got bits {self.bits}, expected two of {BITS}")

    def num_bytes(self, layout: Layout) -> int:
        """Bytes of one pack."""
        keys, values = self.bits
        if not layout.kv_together and keys != values:
            raise ValueError(
                f"{self.name}: got a layout with keys and values in separate packs, expected "
                "kv_together"
            )
        if layout.head_dim % 2 and min(self.bits) == 4:
            raise ValueError(
                f"{self.name}: got head_dim {layout.head_dim}, expected a multiple of 2"
            )
        layers, kinds, chunk, heads, dim = layout.pack_shape
        row = sum(4 + dim * bits // 8 for bits in self.bits[:kinds])
        return -(-layers * chunk * heads * row // ALIGN) * ALIGN

    def encode(self, packs: np.ndarray, layout: Layout) -> np.ndarray:
        out = np.zeros((len(packs), self.num_bytes(layout)), np.uint8)
        for row, pack in zip(out, packs, strict=True):  # one after the other: they fit a cache
            self._encode(pack, row, layout)
        return out

    def _encode(self, pack: np.ndarray, out: np.ndarray, layout: Layout) -> None:
        """One pack [*pack_shape] into `out` uint8 [num_bytes]."""
        if layout.dtype == "bfloat16":  # several times as fast
            x = (pack.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            x = pack.astype(np.float32)
        levels = np.array([2**b - 1 for b in self.bits[: x.shape[1]]], np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            zero = _downward(x.min(-1))
            scale = _upward((x.max(-1) - zero) / levels[:, None, None])
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
        for layer in codes:
            for kind, bits in zip(layer, self.bits, strict=False):
                part = _narrow(kind, bits).reshape(-1)
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
        widths = [dim * bits // 8 for bits in self.bits[:kinds]]  # of a row
        sizes = [chunk * heads * width for width in widths]
        data = stored[:, at : at + layers * sum(sizes)]
        if len(set(widths)) == 1:
            codes = data.reshape(-1, layers, kinds, chunk, heads, widths[0])
            codes = _wide(xp, codes, self.bits[0])
        else:
            data = data.reshape(-1, layers, sum(sizes))
            parts = (data[..., : sizes[0]], data[..., sizes[0] :])
            codes = xp.concatenate(
                [
                    _wide(xp, part.reshape(-1, layers, 1, chunk, heads, width), bits)
                    for part, width, bits in zip(parts, widths, self.bits, strict=True)
                ],
                axis=2,
            )
        return (codes.astype(np.float32) * scale + zero).astype(layout.numpy_dtype)


def _narrow(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., D * bits / 8] from codes uint8 [..., D]."""
    if bits == 8:
        return codes
    low, high = np.split(codes, 2, axis=-1)
    narrow: np.ndarray = low | high << np.uint8(4)
    return narrow


def _wide(xp: Any, data: Any, bits: int) -> Any:
    """Codes uint8 [..., D] from uint8 [..., D * bits / 8]."""
    if bits == 8:
        return data
    return xp.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)


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


CODECS: Mapping[str, Codec | None] = MappingProxyType(
    {
        PLAIN: None,
        "int8": Quantised(name="int8", bits=(8, 8)),
        "k8v4": Quantised(name="k8v4", bits=(8, 4)),
    }
)
"""By name; None: packs lie on disk as they are in memory."""


def codec_named(name: str) -> Codec | None:
    """The codec of a name in `CODECS`. Raises ValueError for another one."""
    if name not in CODECS:
        raise ValueError(f"got codec={name!r}, expected one of {', '.join(CODECS)}")
    return CODECS[name]


def codec_of(layout: Layout) -> Codec | None:
    """The codec that `layout` names. Raises ValueError where it is not known here."""
    codec = CODECS.get(layout.codec.partition(":")[0])
    if codec_id(codec) != layout.codec:
        raise ValueError(
            f"stored with codec {layout.codec!r}, expected one of "
            f"{', '.join(map(codec_id, CODECS.values()))}: ingest the text again"
        )
    if codec is not None and codec.num_bytes(layout) != layout.codec_bytes:
        raise ValueError(
            f"{layout.codec}: got packs of {layout.codec_bytes} bytes, "
            f"expected {codec.num_bytes(layout)}"
        )
    return codec


def known(layout: Layout) -> bool:
    """Whether the codec that `layout` names is known here."""
    try:
        codec_of(layout)
    except ValueError:
        return False
    return True


def codec_id(codec: Codec | None) -> str:
    """Returns the value of `Layout.codec` for a codec."""
    return PLAIN if codec is None else f"{codec.name}:{codec.version}"


def check_codec(codec: Codec | None, layout: Layout) -> None:
    """Raises ValueError unless `codec` is that of `layout`."""
    if codec_id(codec) != layout.codec:
        raise ValueError(f"codec: got {codec_id(codec)!r}, expected {layout.codec!r}")


def encoded(codec: Codec | None, packs: np.ndarray, layout: Layout) -> np.ndarray:
    """Packs as they lie on disk [n, *stored_shape], from bit patterns [n, *pack_shape]."""
    if codec is None:
        return packs
    out = np.ascontiguousarray(codec.encode(packs.view(layout.numpy_dtype), layout))
    if out.dtype != np.uint8 or out.shape != (len(packs), *layout.stored_shape):
        want = (len(packs), *layout.stored_shape)
        raise ValueError(f"{layout.codec}: got {out.dtype} {out.shape}, expected uint8 {want}")
    return out


def decoded(codec: Codec | None, stored: np.ndarray, layout: Layout) -> np.ndarray:
    """Packs [n, *pack_shape] of `layout.numpy_dtype`, from [n, *stored_shape], for the host."""
    if codec is None:
        return stored
    return np.asarray(codec.decode(stored, layout)).view(layout.numpy_dtype)
