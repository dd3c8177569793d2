"""Product quantisation of keys: one of 64 centroids for each half of a KV head (PQCache)."""

from __future__ import annotations

import numpy as np

from ckv_jax.storage.layout import PQ_CODES, PQ_PARTS

SAMPLES = 1024
"""Tokens that the codebooks are trained on."""

# Tokens encoded at once: the distances stay in cache, and the product is too small for the linear
# algebra library to spread it over threads, which costs more than it brings.
_BLOCK = 128


def train(keys: np.ndarray, seed: int = 0) -> np.ndarray:
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


def encode(keys: np.ndarray, books: np.ndarray) -> np.ndarray:
    """Codes uint8 [T, K, 2]: the nearest centroid of keys float32 [T, K, D]."""
    tokens, heads, dim = keys.shape
    flat = books.reshape(-1, PQ_CODES, dim // PQ_PARTS)
    parts = np.ascontiguousarray(keys.reshape(tokens, len(flat), -1).transpose(1, 0, 2))
    codes = np.empty((len(flat), tokens), np.uint8)
    for part, book, code in zip(parts, flat, codes, strict=True):
        turned, norms = np.ascontiguousarray(-2 * book.T), np.square(book).sum(-1)
        for start in range(0, tokens, _BLOCK):
            distance = part[start : start + _BLOCK] @ turned
            distance += norms
            code[start : start + _BLOCK] = distance.argmin(1)
    return np.ascontiguousarray(codes.T).reshape(tokens, heads, PQ_PARTS)
