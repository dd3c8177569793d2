"""Product quantisation of keys: one of 256 centroids for every eight dims of every KV head."""

from __future__ import annotations

import numpy as np

from ckv_jax.storage.layout import PQ_CODES, PQ_DIM

SAMPLES = 1024
"""Tokens that the codebooks are trained on."""

# Tokens encoded at once: the distances stay in cache, and the product is too small for the linear
# algebra library to spread it over threads, which costs more than it brings.
_BLOCK = 128


def train(keys: np.ndarray, seed: int = 0) -> np.ndarray:
    """Codebooks float32 [K, D/8, 256, 8] from sample keys float32 [n, K, D]."""
    # Here: it takes a fifth of the time that importing the package takes, and few stores need it.
    from scipy.cluster.vq import kmeans

    n, heads, dim = keys.shape
    parts = keys.reshape(n, heads * dim // PQ_DIM, PQ_DIM).transpose(1, 0, 2)
    books = np.empty((len(parts), PQ_CODES, PQ_DIM), np.float32)
    first = np.random.default_rng(seed).permutation(n)[:PQ_CODES]
    for book, part in zip(books, parts, strict=True):
        size = float(np.abs(part).max()) or 1.0
        unit = np.ascontiguousarray(part) / np.float32(size)
        found, _ = kmeans(unit, unit[np.sort(first)], thresh=5e-3)
        book[...] = np.resize(found, (PQ_CODES, PQ_DIM)) * np.float32(size)
    return books.reshape(heads, dim // PQ_DIM, PQ_CODES, PQ_DIM)


def encode(keys: np.ndarray, books: np.ndarray) -> np.ndarray:
    """Codes uint8 [T, K, D/8]: the nearest centroid of keys float32 [T, K, D]."""
    tokens, heads, dim = keys.shape
    flat = books.reshape(-1, PQ_CODES, PQ_DIM)
    parts = np.ascontiguousarray(keys.reshape(tokens, len(flat), PQ_DIM).transpose(1, 0, 2))
    codes = np.empty((len(flat), tokens), np.uint8)
    for part, book, code in zip(parts, flat, codes, strict=True):
        turned, norms = np.ascontiguousarray(-2 * book.T), np.square(book).sum(-1)
        for start in range(0, tokens, _BLOCK):
            distance = part[start : start + _BLOCK] @ turned
            distance += norms
            code[start : start + _BLOCK] = distance.argmin(1)
    return np.ascontiguousarray(codes.T).reshape(tokens, heads, dim // PQ_DIM)
