"""Attention of one query a sequence on a CPU by the native library (`native/kernels.cc`).

Blocks of 128 tokens, first of pages and then of new rows, go one by one to XLA's threads; each
leaves its greatest logit, its sum of exponentials and its sum of values, which are joined in order.
No sum depends on the batch, on empty pages behind, or on how many threads there are.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ckv_jax.kernels_pallas.native.library import LANES, call, required_level
from ckv_jax.kernels_pallas.target import Target

__all__ = ["attend"]

_BLOCK = 128  # `kBlock`


def attend(
    q: Array,
    pages: Array,
    k_table: Array,
    v_table: Array,
    lengths: Array,
    k_new: Array,
    v_new: Array,
    q_start: Array,
    *,
    target: Target,
    level: int | None = None,
) -> tuple[Array, Array]:
    """See `api.attend`. `level`: of `library.LEVELS`; None: the best.

    Raises NotImplementedError for more queries, other dtypes and dims that are no multiple of 4,
    and where there is no library or the instructions are lacking.
    """
    del target  # a CPU
    batch, queries, heads, dim = q.shape
    if queries != 1 or {q.dtype, k_new.dtype} != {jnp.dtype(jnp.bfloat16)} or dim % 4:
        raise NotImplementedError(
            f"got {queries} queries of {q.dtype} and {dim} dims over {k_new.dtype}, expected one "
            "of bfloat16 with a multiple of 4 dims"
        )
    level = required_level(level)
    chunk, entries = pages.shape[1], k_table.shape[1]
    per = max(_BLOCK // chunk, 1)  # pages of a block
    blocks = -(-entries // per) + -(-k_new.shape[1] // (per * chunk))
    stride = 2 + -(-dim // (2 * LANES[level])) * 2 * LANES[level]
    out, lse, _ = call(
        "ckv_attend",
        [
            (q.shape, q.dtype),
            ((batch, queries, heads), jnp.float32),
            ((batch, blocks, heads, stride), jnp.float32),
        ],
        q, pages, k_table, v_table, lengths, k_new, v_new, q_start, level=level,
    )  # fmt: skip
    return out, lse
