"""Chunk scores on a CPU by the native library (`native/kernels.cc`).

A query is rounded to int8, 127 of which are its largest number (to 16 bits where that is more than
8 times the root of its mean square), and multiplied with a probe's codes as they are: sums are
exact. In a vector each lane is another chunk, so that chunks are summed without a shuffle. Blocks
of keys go one by one to XLA's threads; of each block every chunk's sum of exponentials and the
block's maximum stay, as in `reference.score`. No sum depends on the batch or on how many threads
there are.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from ckv_jax.kernels_pallas.native.library import LANES, call, required_level
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Probe, TurnedKeys
from ckv_jax.kernels_pallas.target import Target

_TOGETHER = 4  # rows that go over keys at once
_MOST = 256  # dims, with which sums of int32 are exact, and tokens of a chunk
_SCRATCH = 7  # arrays in it and one more, each at a multiple of 64 bytes


def score(
    q: Array,
    probe: Probe,
    num_tokens: Array,
    q_lengths: Array,
    chunk_tokens: int,
    peaks: bool = False,
    *,
    target: Target,
    level: int | None = None,
) -> Array:
    """See `api.score`; float32 [*2, B, K, M]. `level`: of `library.LEVELS`; None: the best.

    Raises NotImplementedError for other probes than int4 and turned keys, for more than 256
    dims or tokens of a chunk, and where there is no library or the instructions are lacking.
    """
    del target  # a CPU
    if not isinstance(probe, Int4Keys | TurnedKeys):
        raise NotImplementedError(f"got {type(probe).__name__}, expected int4 or turned keys")
    if q.dtype not in (jnp.bfloat16, jnp.float32) or q.size == 0:
        raise NotImplementedError(f"got q {q.dtype}{q.shape}, expected bfloat16 or float32")
    tokens, kv_heads, dim = probe.shape
    if isinstance(probe, TurnedKeys):
        q = _turned(q, probe.basis)
    batch, queries, heads, width = q.shape
    words = 8 if isinstance(probe, Int4Keys) else 4  # dims of 32 bits of codes
    if width % words or max(width, chunk_tokens) > _MOST:
        raise NotImplementedError(
            f"got {width} dims and chunks of {chunk_tokens} tokens, expected a multiple of {words} "
            f"and at most {_MOST}"
        )
    level = required_level(level)
    lanes, chunks = LANES[level], tokens // chunk_tokens
    rows = kv_heads * _up(batch * queries * (heads // kv_heads), _TOGETHER)
    blocks = -(-chunks // lanes)
    numbers = rows * (blocks * lanes + _up(blocks, lanes) + width // 2 + 3)
    shape = (1 + peaks, batch, kv_heads, chunks)
    scores, _ = call(
        "ckv_score",
        [(shape, jnp.float32), ((4 * numbers + 64 * _SCRATCH,), jnp.uint8)],
        q, probe.codes, probe.scale, num_tokens, q_lengths, chunk=chunk_tokens,
        heads_first=isinstance(probe, TurnedKeys), factor=math.log2(math.e) / math.sqrt(dim),
        level=level,
    )  # fmt: skip
    return scores if peaks else scores[0]


def _turned(q: Array, basis: Array) -> Array:
    """Queries [B, S, H, D] in the basis of each KV head, float32 [B, S, H, R]."""
    batch, queries, heads, dim = q.shape
    kv_heads, _, width = basis.shape
    rows = q.astype(jnp.float32).reshape(batch, queries, kv_heads, heads // kv_heads, dim)
    turned = jnp.einsum("bskgd,kdr->bskgr", rows, basis, precision=lax.Precision.HIGHEST)
    return turned.reshape(batch, queries, heads, width)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
