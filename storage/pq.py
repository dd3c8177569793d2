"""Product quantisation of keys: one of 256 centroids for every eight dims of every KV head."""

from __future__ import annotations

import numpy as np
from scipy.cluster.vq import kmeans

from ckv_jax.storage.layout import PQ_CODES, PQ_DIM

SAMPLES = 1024
"""Tokens that the codebooks are trained on."""

_BLOCK = 512  # tokens encoded at once, so that the distances stay in cache


def train(keys: np.ndarray, seed: int = 0) -> np.ndarray:
    """Codebooks float32 [K, D/8, 256, 8] from sample keys float32 [n, K, D]."""
    n, heads, dim = keys.shape
    parts = keys.reshape(n, heads * dim // PQ_DIM, PQ_DIM).transpose(1, 0, 2)
    books = np.empty((len(parts), PQ_CODES, PQ_DIM), np.float32)
    first = np.random.default_rng(seed).permutation(n)[:PQ_CODES]
    for book, part in zip(books, parts, strict=True):
        size = float(np.abs(part).max()) or 1.0
        unit = np.ascontiguousarray(part) / np.float32(size)
        found, _ = kmeans(unit, unit[np.sort(first)], thresh=1e-3)
        book[...] = np.resize(found, (PQ_CODES, PQ_DIM)) * np.float32(size)
    return books.reshape(heads, dim // PQ_DIM, PQ_CODES, PQ_DIM)


def encode(keys: np.ndarray, books: np.ndarray) -> np.ndarray:
    """Codes uint8 [T, K, D/8]: the nearest centroid of keys float32 [T, K, D]."""
    tokens, heads, dim = keys.shape
    codes = np.empty((tokens, heads, dim // PQ_DIM), np.uint8)
    flat = books.reshape(-1, PQ_CODES, PQ_DIM)
    turned = np.ascontiguousarray((-2 * flat).transpose(0, 2, 1))  # [K * D/8, 8, 256]
    norms = np.square(flat).sum(-1)
    out = codes.reshape(tokens, -1)
    for start in range(0, tokens, _BLOCK):
        block = keys[start : start + _BLOCK].reshape(-1, len(flat), PQ_DIM)
        for part in range(len(flat)):
            distance = block[:, part] @ turned[part]
            distance += norms[part]
            out[start : start + _BLOCK, part] = distance.argmin(1)
    return codes
