"""CPU kernels by `native/kernels.cc`: attention, chunk scores, top-k.

No sum depends on the batch, on empty pages behind, or on how many threads there are.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from ckv_jax.kernels_pallas.native.library import LANES, call, required_level
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Probe
from ckv_jax.kernels_pallas.target import Target

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
) -> tuple[Array, Array]:
    """See `attend.attend`.

    Of one query per sequence, blocks of 128 tokens, first of pages and then of new rows, go one by
    one to XLA's threads; each leaves its greatest logit, its sum of exponentials and its sum of
    values, which are joined in order. Of more queries, a task takes two vectors of a KV head's
    rows, one row in each lane, over all tokens, 128 at a time.

    Raises NotImplementedError for other dtypes, dims that are no multiple of 4 (of 8 for more
    than one query), and where there is no library.
    """
    del target  # a CPU
    batch, queries, heads, dim = q.shape
    multiple = 4 if queries == 1 else 8
    if {q.dtype, k_new.dtype} != {jnp.dtype(jnp.bfloat16)} or dim % multiple:
        raise NotImplementedError(
            f"got {queries} queries of {q.dtype} and {dim} dims over {k_new.dtype}, expected "
            f"bfloat16 and a multiple of {multiple} dims"
        )
    level = required_level()
    parts = (0, 0, 0, 0)
    if queries == 1:
        chunk, entries = pages.shape[1], k_table.shape[1]
        per = max(_BLOCK // chunk, 1)  # pages of a block
        blocks = -(-entries // per) + -(-k_new.shape[1] // (per * chunk))
        stride = 2 + -(-dim // (2 * LANES[level])) * 2 * LANES[level]
        parts = batch, blocks, heads, stride
    out, lse, _ = call(
        "ckv_attend",
        [
            (q.shape, q.dtype),
            ((batch, queries, heads), jnp.float32),
            (parts, jnp.float32),
        ],
        q, pages, k_table, v_table, lengths, k_new, v_new, q_start, level=level,
    )  # fmt: skip
    return out, lse


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
    chunk_ids: Array | None = None,
    *,
    target: Target,
) -> Array:
    """See `score.score`; float32 [*2, B, K, M].

    A query is rounded to int8, 127 of which are its largest number (to 16 bits where that is more
    than 8 times the root of its mean square), and multiplied with a probe's codes as they are: sums
    are exact. In a vector each lane is another chunk, so that chunks are summed without a shuffle.
    With AVX-512, up to four rows of at most 128 dims are multiplied key by key; other rows after a
    block is transposed.
    Blocks of keys go one by one to XLA's threads; of each block every chunk's sum of exponentials
    and the block's maximum stay, as in `score.reference`.

    The keys of `chunk_ids` are read where they are.

    Raises NotImplementedError for other probes than int4 keys, queries of other dtypes or none,
    dims that are no multiple of 8, more than 256 dims or tokens of a chunk, and where there is no
    library.
    """
    del target  # a CPU
    if not isinstance(probe, Int4Keys):
        raise NotImplementedError(f"got {type(probe).__name__}, expected int4 keys")
    if q.dtype not in (jnp.bfloat16, jnp.float32) or q.size == 0:
        raise NotImplementedError(f"got q {q.dtype}{q.shape}, expected bfloat16 or float32")
    tokens, kv_heads, dim = probe.shape
    batch, queries, heads, _ = q.shape
    if dim % 8 or max(dim, chunk_tokens) > _MOST:
        raise NotImplementedError(
            f"got {dim} dims and chunks of {chunk_tokens} tokens, expected a multiple of 8 and at "
            f"most {_MOST}"
        )
    level = required_level()
    lanes, chunks = LANES[level], tokens // chunk_tokens
    if chunk_ids is None:
        chunk_ids = jnp.zeros(0, jnp.int32)
    else:
        chunks = len(chunk_ids)
    rows = kv_heads * _up(batch * queries * (heads // kv_heads), _TOGETHER)
    blocks = -(-chunks // lanes)
    numbers = rows * (blocks * lanes + _up(blocks, lanes) + dim // 2 + 3)
    shape = (1 + peaks, batch, kv_heads, chunks)
    scores, _ = call(
        "ckv_score",
        [(shape, jnp.float32), ((4 * numbers + 64 * _SCRATCH,), jnp.uint8)],
        q.astype(jnp.float32), probe.codes, probe.scale, num_tokens, q_lengths, chunk_ids,
        chunk=chunk_tokens, factor=math.log2(math.e) / math.sqrt(dim), level=level,
    )  # fmt: skip
    return scores if peaks else scores[0]


def best(
    scores: Array, n: int, ages: Array | None = None, *, target: Target
) -> tuple[Array, Array]:
    """See `score.best`.

    Raises NotImplementedError for other dtypes than float32, and where there is no library.
    """
    del target  # a CPU
    if scores.dtype != jnp.float32:
        raise NotImplementedError(f"got scores {scores.dtype}, expected float32")
    shape = (len(scores), n)
    results = [(shape, jnp.float32), (shape, jnp.int32)]
    given = scores, jnp.zeros(0, jnp.int32) if ages is None else ages
    values, ids = call("ckv_best", results, *given, level=required_level())
    return values, ids


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
