"""Digests with a landmark for each chunk: the mean of its keys, or their bounds (Quest).

A landmark depends on its own chunk alone: there are no parameters to inherit, and segments join as
they are.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ckv_jax.storage.layout import Layout


def encode(keys: np.ndarray, layout: Layout) -> np.ndarray:
    """Codes uint8 [M, K, digest_codes] of float32 `keys` [T, K, D] that begin with a chunk.

    "means": the mean key of each chunk in the layout's dtype. "bounds": the least, then the
    greatest value of each dim, exact.
    """
    starts = np.arange(0, len(keys), layout.chunk_tokens)
    if layout.digest == "means":
        parts = [np.add.reduceat(keys, starts) / _sizes(len(keys), layout)[:, None, None]]
    else:
        parts = [np.minimum.reduceat(keys, starts), np.maximum.reduceat(keys, starts)]
    most = float(ml_dtypes.finfo(layout.numpy_dtype).max)
    values = np.stack([np.clip(part, -most, most) for part in parts], axis=2)  # [M, K, n, D]
    codes = np.ascontiguousarray(values.astype(layout.numpy_dtype)).view(np.uint8)
    return codes.reshape(*codes.shape[:2], layout.digest_codes)


def decode(codes: np.ndarray, layout: Layout, tokens: int) -> dict[str, np.ndarray]:
    """The arrays of a digest of `tokens` tokens, by name, from codes uint8 [R, M, K, *].

    "means": mean [R, M, K, D] and log_size float32 [R, M, K], the logarithm of how many tokens
    the mean stands for. "bounds": low and high [R, M, K, D].
    """
    values = codes.view(layout.numpy_dtype).reshape(*codes.shape[:3], -1, layout.head_dim)
    if layout.digest == "bounds":
        return {"low": values[:, :, :, 0], "high": values[:, :, :, 1]}
    log_size = np.log(_sizes(tokens, layout))[None, :, None]
    whole = np.ascontiguousarray(np.broadcast_to(log_size, codes.shape[:3]))
    return {"mean": values[:, :, :, 0], "log_size": whole}


def _sizes(tokens: int, layout: Layout) -> np.ndarray:
    """float32 [M], tokens of each chunk."""
    sizes = np.full(layout.num_chunks(tokens), layout.chunk_tokens, np.float32)
    sizes[-1] = tokens - layout.chunk_tokens * (len(sizes) - 1)
    return sizes
