"""Digests with a landmark for each chunk: the mean of its keys, or their bounds (Quest).

Beside the mean key there may be how little the chunk's least alike key is like it, by which the
chunks are found that a mean says least of (ShadowKV, Sun et al. 2025).

A landmark depends on its own chunk alone: there are no parameters to inherit, and segments join as
they are.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ckv_jax.storage.layout import Layout

_COSINE = 4  # bytes of one, float32


def encode(keys: np.ndarray, layout: Layout) -> np.ndarray:
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


def decode(codes: np.ndarray, layout: Layout, tokens: int) -> dict[str, np.ndarray]:
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
