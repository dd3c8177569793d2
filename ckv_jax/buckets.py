"""Buckets of lengths: rounds lengths up, so that a warm engine meets only compiled shapes."""

from __future__ import annotations

import numpy as np


def bucket(n: int, *, least: int = 1) -> int:
    """The smallest of least, 1.25, 1.5, 1.75, 2, 2.5 … times a power of two that holds `n`.

    Four sizes an octave: at most 25% is padding.
    """
    if n <= least:
        return least
    octave = 1 << (n - 1).bit_length() - 1  # largest power of two below n
    quarter = max(1, octave // 4)
    return octave + -(-(n - octave) // quarter) * quarter


def suffix_bucket(n: int) -> int:
    """Suffix lengths: powers of two from 16."""
    return max(16, 1 << (n - 1).bit_length())


def batch_bucket(n: int) -> int:
    """Batch sizes: powers of two."""
    return 1 << (n - 1).bit_length()


def chunk_bucket(n: int, chunks: int) -> int:
    """Room for `n` of a prefix's `chunks`: 256 times a power of four, or room for all of more
    than 256.

    So few sizes that the programs of every budget can be compiled before the first question, and
    that a prefix that grows meets none. What is attended to skips entries that hold no chunk: they
    cost no read and next to no time.
    """
    room = 256
    while room < n:
        room *= 4
    return min(room, bucket(chunks, least=256))


def probe_bucket(chunks: int, *, step: int = 64) -> int:
    """Chunks of a probe: multiples of `step`, coarser above 16 steps."""
    return -(-chunks // step) * step if chunks <= 16 * step else bucket(chunks)


def pad_rows(rows: np.ndarray, length: int) -> np.ndarray:
    """`rows` with zero rows appended along axis 0 up to `length`."""
    out = np.zeros((length, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out
