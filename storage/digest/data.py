"""Compressed keys, of the layers that select, small enough to stay in memory and rank all chunks.

int8 and int4 keep, per token and KV head, a scale and the rounded difference to the head's mean
key: keys ~ mean + scale * codes. The mean is not needed for scoring: softmax does not see a shift
that is the same for all keys. "pq" keeps six bits for each half of a key: one of 64 centroids
(PQCache). Mean and codebooks come from a prefix's first segment and are inherited by all that
continue it, so that one softmax may span them.

Those of `LANDMARKS` keep a landmark for each chunk: the mean of its keys, or their bounds (Quest).
With the mean there may be the cosine of the chunk's least alike key, by which the chunks are found
that a mean says least of (ShadowKV, Sun et al. 2025). A landmark depends on its own chunk alone:
there are no parameters to inherit, and segments join as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ckv_jax.storage.layout import LANDMARKS, PQ_CODES, PQ_PARTS, Layout


@dataclass(frozen=True, slots=True, eq=False)
class DigestData:
    """A prefix's digest; the arrays are read-only, their R rows are the layout's `digest_layers`.

    Attributes:
      kind: "int8", "int4", "pq", or one of `LANDMARKS`.
      arrays: int8: codes int8 [R, T, K, D], scale float32 [R, T, K]. int4: codes uint8
        [R, T, K, D/2] (low nibble dim d, high nibble dim d + D/2, stored + 8), scale. pq: codes
        uint8 [R, T, K, 2], codebooks float32 [R, K, 2, 64, D/2]. Landmarks: those of
        `landmark_arrays`.
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
        return pq_encode(keys, books[1]), scale
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


PQ_SAMPLES = 1024
"""Tokens that the codebooks are trained on."""

# Tokens encoded at once: the distances stay in cache, and the product is too small for the linear
# algebra library to spread it over threads, which costs more than it brings.
_PQ_BLOCK = 128


def pq_train(keys: np.ndarray, seed: int = 0) -> np.ndarray:
    """Codebooks float32 [K, 2, 64, D/2] from sample keys float32 [n, K, D]."""
    # Here: it takes a fifth of the time that importing the package takes, and few stores need it.
    from scipy.cluster.vq import kmeans

    n, heads, dim = keys.shape
    size = dim // PQ_PARTS
    parts = keys.reshape(n, heads * PQ_PARTS, size).transpose(1, 0, 2)
    books = np.empty((len(parts), PQ_CODES, size), np.float32)
    first = np.random.default_rng(seed).permutation(n)[:PQ_CODES]
    for book, part in zip(books, parts, strict=True):
        largest = np.float32(np.abs(part).max()) or np.float32(1)
        unit = np.ascontiguousarray(part) / largest
        found, _ = kmeans(unit, unit[np.sort(first)], thresh=5e-3)
        book[...] = np.resize(found, (PQ_CODES, size)) * largest
    return books.reshape(heads, PQ_PARTS, PQ_CODES, size)


def pq_encode(keys: np.ndarray, books: np.ndarray) -> np.ndarray:
    """Codes uint8 [T, K, 2]: the nearest centroid of keys float32 [T, K, D]."""
    tokens, heads, dim = keys.shape
    flat = books.reshape(-1, PQ_CODES, dim // PQ_PARTS)
    parts = np.ascontiguousarray(keys.reshape(tokens, len(flat), -1).transpose(1, 0, 2))
    codes = np.empty((len(flat), tokens), np.uint8)
    for part, book, code in zip(parts, flat, codes, strict=True):
        turned, norms = np.ascontiguousarray(-2 * book.T), np.square(book).sum(-1)
        for start in range(0, tokens, _PQ_BLOCK):
            distance = part[start : start + _PQ_BLOCK] @ turned
            distance += norms
            code[start : start + _PQ_BLOCK] = distance.argmin(1)
    return np.ascontiguousarray(codes.T).reshape(tokens, heads, PQ_PARTS)


_COSINE = 4  # bytes of one, float32


def landmark_codes(keys: np.ndarray, layout: Layout) -> np.ndarray:
    """Codes uint8 [M, K, digest_codes] of float32 `keys` [T, K, D] that begin with a chunk.

    Means are of the layout's dtype. "means+cosines": after a mean key the least cosine of it and
    one of its keys, float32. "bounds": the least, then the greatest value of each dim, exact.
    """
    starts = np.arange(0, len(keys), layout.chunk_tokens)
    if layout.digest == "bounds":
        parts = [np.minimum.reduceat(keys, starts), np.maximum.reduceat(keys, starts)]
    else:
        parts = [np.add.reduceat(keys, starts) / _sizes(len(keys), layout)[:, None, None]]
    most = float(ml_dtypes.finfo(layout.numpy_dtype).max)
    rounded = np.stack([np.clip(part, -most, most) for part in parts], axis=2)  # [M, K, n, D]
    codes = np.ascontiguousarray(rounded.astype(layout.numpy_dtype)).view(np.uint8)
    codes = codes.reshape(*codes.shape[:2], -1)
    if layout.digest != "means+cosines":
        return codes
    cosines = _least_cosines(keys, parts[0], starts, layout.chunk_tokens)
    return np.concatenate([codes, cosines[:, :, None].view(np.uint8)], axis=2)


def landmark_arrays(codes: np.ndarray, layout: Layout, tokens: int) -> dict[str, np.ndarray]:
    """The arrays of a digest of `tokens` tokens, by name, from codes uint8 [R, M, K, *].

    Means: mean [R, M, K, D] and log_size float32 [R, M, K], the logarithm of how many tokens the
    mean stands for; with cosines, oddity int32 [R, M, K]: a chunk's place among those of its layer
    and head, where 0 has the key that is least like its mean and of equal ones the earlier comes
    first. "bounds": low and high [R, M, K, D].
    """
    bare = codes[..., :-_COSINE] if layout.digest == "means+cosines" else codes
    values = np.ascontiguousarray(bare).view(layout.numpy_dtype)
    values = values.reshape(*codes.shape[:3], -1, layout.head_dim)
    if layout.digest == "bounds":
        return {"low": values[:, :, :, 0], "high": values[:, :, :, 1]}
    log_size = np.log(_sizes(tokens, layout))[None, :, None]
    whole = np.ascontiguousarray(np.broadcast_to(log_size, codes.shape[:3]))
    found = {"mean": values[:, :, :, 0], "log_size": whole}
    if layout.digest == "means+cosines":
        cosines = np.ascontiguousarray(codes[..., -_COSINE:]).view(np.float32)[..., 0]
        order = np.argsort(cosines, axis=1, kind="stable")
        found["oddity"] = np.argsort(order, axis=1).astype(np.int32)
    return found


def _least_cosines(
    keys: np.ndarray, means: np.ndarray, starts: np.ndarray, chunk_tokens: int
) -> np.ndarray:
    """float32 [M, K]: of each chunk the least cosine of one of its keys and its mean; of a key or
    mean of length 0 it is 0."""
    keys, means = keys.astype(np.float64), means.astype(np.float64)  # squares of bad keys are large
    own = np.repeat(means, chunk_tokens, axis=0)[: len(keys)]
    product = np.einsum("tkd,tkd->tk", keys, own)
    lengths = np.linalg.norm(keys, axis=2) * np.linalg.norm(own, axis=2)
    cosines = np.divide(product, lengths, out=np.zeros_like(product), where=lengths > 0)
    least: np.ndarray = np.minimum.reduceat(cosines, starts).astype(np.float32)
    return least


def _sizes(tokens: int, layout: Layout) -> np.ndarray:
    """float32 [M], tokens of each chunk."""
    sizes = np.full(layout.num_chunks(tokens), layout.chunk_tokens, np.float32)
    sizes[-1] = tokens - layout.chunk_tokens * (len(sizes) - 1)
    return sizes
