"""Compressed keys, of the layers that select, small enough to stay in memory and rank all chunks.

int8 and int4 keep, per token and KV head, a scale and the rounded difference to the head's mean
key: keys ~ mean + scale * codes. The mean is not needed for scoring: softmax does not see a shift
that is the same for all keys. "pq" keeps six bits for each half of a key (`pq.py`). Mean and
codebooks come from a prefix's first segment and are inherited by all that continue it, so that one
softmax may span them. Those of `LANDMARKS` keep a landmark for each chunk (`landmarks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckv_jax.storage.digest import pq
from ckv_jax.storage.layout import PQ_CODES, PQ_PARTS, Layout
from ckv_jax.storage.layout_versions import LANDMARKS


@dataclass(frozen=True, slots=True, eq=False)
class DigestData:
    """A prefix's digest; the arrays are read-only, their R rows are the layout's `digest_layers`.

    Attributes:
      kind: "int8", "int4", "pq", or one of `LANDMARKS`.
      arrays: int8: codes int8 [R, T, K, D], scale float32 [R, T, K]. int4: codes uint8
        [R, T, K, D/2] (low nibble dim d, high nibble dim d + D/2, stored + 8), scale. pq: codes
        uint8 [R, T, K, 2], codebooks float32 [R, K, 2, 64, D/2]. Landmarks: those of
        `landmarks.decode`.
      mixed: whether segments that were made around other parameters were brought to the first's.
    """

    kind: str
    arrays: dict[str, np.ndarray]
    mixed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())

    def keys(self) -> np.ndarray:
        """float32 [R, T, K, D]: the keys as the digest knows them, less the mean for int8, int4.

        Raises ValueError for a digest that knows no single key.
        """
        if self.kind in LANDMARKS:
            raise ValueError(f"got a digest of kind {self.kind!r}, which knows no single key")
        codes = self.arrays["codes"]
        if self.kind == "pq":
            books = self.arrays["codebooks"]
            layers, _, heads, parts = codes.shape
            index = np.ix_(range(layers), range(heads), range(parts))
            picked = books[index[0][:, None], index[1][:, None], index[2][:, None], codes]
            found: np.ndarray = picked.reshape(*codes.shape[:3], -1)
            return found
        if self.kind == "int4":
            codes = np.concatenate([codes & 15, codes >> 4], -1).astype(np.int8) - np.int8(8)
        values: np.ndarray = codes * self.arrays["scale"][..., None]
        return values


def turn(
    layout: Layout, codes: np.ndarray, scale: np.ndarray, old: np.ndarray, new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One layer's codes uint8 [T, K, Db] and scale [T, K], made around `old`, as if around `new`.

    Loses as much again as the first rounding did. `scale` is empty for "pq".
    """
    heads, dim = layout.num_kv_heads, layout.head_dim
    if layout.digest == "pq":
        books = [p.reshape(heads, PQ_PARTS, PQ_CODES, dim // PQ_PARTS) for p in (old, new)]
        index = np.ix_(range(heads), range(PQ_PARTS))
        keys = books[0][index[0][None], index[1][None], codes].reshape(-1, heads, dim)
        return pq.encode(keys, books[1]), scale
    if layout.digest == "int4":
        values = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32) - np.float32(8)
    else:
        values = codes.view(np.int8).astype(np.float32)
    keys = values * scale[..., None] + (old - new).reshape(heads, dim)
    return quantise(keys, layout.digest)


def quantise(keys: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [..., Db] and scale float32 [...] of float32 `keys` [..., D], less their mean."""
    levels = np.float32(127 if kind == "int8" else 7)
    scale = np.abs(keys).max(-1) / levels
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(keys * inverse[..., None])
    np.clip(codes, -levels, levels, out=codes)
    signed = codes.astype(np.int8)
    if kind == "int8":
        return signed.view(np.uint8), scale
    half = keys.shape[-1] // 2
    nibbles = (signed + np.int8(8)).view(np.uint8)
    return nibbles[..., :half] | (nibbles[..., half:] << 4), scale


def as_float32(bits: np.ndarray, layout: Layout) -> np.ndarray:
    """Stored values as float32, without infinities and NaN."""
    if layout.dtype == "bfloat16":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        values = bits.view(layout.numpy_dtype).astype(np.float32)
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=0.0, posinf=1e30, neginf=-1e30)
    return values
