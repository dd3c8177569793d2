"""Paged attention in jnp: the twin the kernels are tested against, and what a CPU runs.

One matmul a KV head with the G query heads folded into its rows: on a CPU this avoids the
transposed copy of the keys that a batched einsum makes, and is twice as fast.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

_LOGITS_BYTES = 2 * 2**20  # of one KV head's float32 logits at a time: what a CPU's caches hold
_WIDE_BYTES = 8 * 2**20  # the same where keys are widened again for every block
_PIECE = 512  # page tokens that a question attends to at a time
_QUESTION = 128  # queries at most


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
    widen: bool = False,
    logits_bytes: int | None = None,
) -> tuple[Array, Array]:
    """See `api.attend`. `widen`: multiplies in float32, see `Target.widens`.

    Queries go in blocks whose logits, of one KV head and one sequence, take about `logits_bytes`
    (None: as is fastest).

    Sequences go one after the other: a loop compiles four times faster than eight copies of its
    body, and runs three times faster on a CPU, where they would compete for its caches. A question
    attends to pages piece by piece, up to the last entry that holds any: how wide a table is
    changes neither the time nor a bit.
    """

    if logits_bytes is None:
        logits_bytes = _WIDE_BYTES if widen else _LOGITS_BYTES

    def one(row: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k_table, v_table, lengths, k_new, v_new, q_start = row
        tail = k_new.shape[0]
        seen = jnp.arange(tail, dtype=jnp.int32) < q_start + q.shape[0]
        keys, values = k_new, jnp.where(seen[:, None], v_new, 0)  # [T, K*D]
        valid, pieces = jnp.zeros(0, bool), []
        if q.shape[0] <= _QUESTION and k_table.shape[0] * pages.shape[1] > _PIECE:
            tables = k_table, v_table, lengths
            pieces.append(_by_pieces(q, pages, tables, k_new.dtype, logits_bytes, widen))
        elif k_table.shape[0]:
            old_keys, old_values, valid = _context(pages, k_table, v_table, lengths, k_new.dtype)
            keys = jnp.concatenate([old_keys, keys], axis=0)
            values = jnp.concatenate([old_values, values], axis=0)
        last = q_start + jnp.arange(q.shape[0], dtype=jnp.int32)
        found = _by_query_blocks(q, keys, values, valid, last, logits_bytes, widen)
        out, lse = _joined(pieces[0], found) if pieces else found
        return out.astype(q.dtype), lse

    rows: tuple[Array, ...] = (q, k_table, v_table, lengths, k_new, v_new, q_start)
    if q.shape[0] > 1:
        outs, lses = lax.map(one, rows)
        return outs, lses
    out, lse = one(tuple(row[0] for row in rows))
    return out[None], lse[None]


def attend_upto(q: Array, keys: Array, values: Array, last: Array) -> Array:
    """Softmax attention of one sequence's tokens that do not follow one another.

    Query i sees the keys of rows up to `last[i]`, the row that it has itself: q [S, H, D], keys and
    values [R, K*D], last int32 [S] -> [S, H, D]. What stands in rows that no query sees must be
    finite. Plain XLA on every device.
    """
    no_pages = jnp.zeros(0, bool)
    out, _ = _by_query_blocks(q, keys, values, no_pages, last, _LOGITS_BYTES, False)
    return out.astype(q.dtype)


def _by_pieces(
    q: Array, pages: Array, tables: tuple[Array, Array, Array], dtype: jnp.dtype,
    logits_bytes: int, widen: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """One sequence's attention to its pages alone: `tables` of keys, of values, and lengths [N]."""
    chunk, entries = pages.shape[1], tables[0].shape[0]
    size = max(1, _PIECE // chunk)
    tables = tuple(jnp.pad(one, (0, -entries % size)) for one in tables)
    last = jnp.zeros(q.shape[0], jnp.int32)  # there is nothing after the pages

    def add(piece: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        mine = [lax.dynamic_slice_in_dim(one, piece * size, size) for one in tables]
        keys, values, valid = _context(pages, *mine, dtype)
        more = _by_query_blocks(q, keys, values, valid, last, logits_bytes, widen)
        return _joined(found, more)

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    held = jnp.arange(1, tables[2].shape[0] + 1, dtype=jnp.int32)
    used = jnp.max(jnp.where(tables[2] > 0, held, 0))
    found: tuple[Array, Array] = lax.fori_loop(0, -(-used // size), add, nothing)
    return found


def _joined(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention to two disjoint parts, float32 [S, H, D] and its log-sum-exp [S, H], as one."""
    (out, lse), (more, more_lse) = one, other
    top = jnp.maximum(jnp.maximum(lse, more_lse), jnp.finfo(jnp.float32).min)
    weight, more_weight = jnp.exp(lse - top), jnp.exp(more_lse - top)
    total = weight + more_weight
    share = jnp.where(total > 0, total, 1.0)
    out = out * (weight / share)[..., None] + more * (more_weight / share)[..., None]
    return out, jnp.where(total > 0, top + jnp.log(share), -jnp.inf)


def _context(
    pages: Array,
    k_table: Array,
    v_table: Array,
    lengths: Array,
    dtype: jnp.dtype,
) -> tuple[Array, Array, Array]:
    """The page tokens of one sequence: keys and values [N*C, K*D], valid bool [N*C]."""
    num_pages, chunk, width = pages.shape
    inside = (k_table >= 0) & (k_table < num_pages) & (v_table >= 0) & (v_table < num_pages)
    lengths = jnp.where(inside, lengths, 0)
    valid = jnp.arange(chunk, dtype=jnp.int32)[None, :] < lengths[:, None]  # [N, C]
    keys = jnp.take(pages, k_table, axis=0, mode="clip")
    values = jnp.take(pages, v_table, axis=0, mode="clip")
    values = jnp.where(valid[:, :, None], values, jnp.zeros((), values.dtype))
    if pages.dtype != dtype:  # bit patterns, of which 0 is 0.0
        keys, values = (lax.bitcast_convert_type(x, dtype) for x in (keys, values))
    return keys.reshape(-1, width), values.reshape(-1, width), valid.reshape(-1)


def _by_query_blocks(
    q: Array, keys: Array, values: Array, valid: Array, last: Array, logits_bytes: int, widen: bool
) -> tuple[Array, Array]:
    """One sequence: q [S, H, D], keys and values [T, K*D] -> float32 out [S, H, D], lse [S, H].

    Query i sees the keys that are `valid`, and of those after them up to number `last[i]`.
    """
    queries, heads, dim = q.shape
    tokens, kv_heads = keys.shape[0], keys.shape[1] // dim
    if tokens == 0:
        nothing = jnp.zeros(q.shape, jnp.float32)
        return nothing, jnp.full((queries, heads), -jnp.inf, jnp.float32)
    block = max(16, logits_bytes // (4 * tokens * (heads // kv_heads)) // 16 * 16)
    product = jnp.dtype(jnp.float32) if widen else keys.dtype
    if queries <= block:
        return _dense(q, keys, values, valid, last, product)
    blocks = -(-queries // block)
    more = blocks * block - queries
    padded = jnp.pad(q, ((0, more), (0, 0), (0, 0)))
    ends = jnp.pad(last, (0, more))
    out, lse = lax.map(
        lambda part: _dense(part[0], keys, values, valid, part[1], product),
        (padded.reshape(blocks, block, heads, dim), ends.reshape(blocks, block)),
    )
    return out.reshape(-1, heads, dim)[:queries], lse.reshape(-1, heads)[:queries]


def _dense(
    q: Array, keys: Array, values: Array, valid: Array, last: Array, product: jnp.dtype
) -> tuple[Array, Array]:
    queries, heads, dim = q.shape
    kv_heads = keys.shape[1] // dim
    group = heads // kv_heads
    tail = keys.shape[0] - valid.shape[0]
    rows = q.reshape(queries, kv_heads, group, dim).swapaxes(0, 1)  # [K, S, G, D]
    rows = rows.reshape(kv_heads, queries * group, dim)
    causal = jnp.arange(tail, dtype=jnp.int32)[None, :] <= last[:, None]  # [S, R]
    pages_seen = jnp.broadcast_to(valid[None, :], (queries, valid.shape[0]))
    mask = jnp.repeat(jnp.concatenate([pages_seen, causal], axis=1), group, axis=0)  # [S*G, T]
    outs, lses = [], []
    for head in range(kv_heads):
        of_head = slice(head * dim, (head + 1) * dim)
        logits = lax.dot_general(
            rows[head].astype(product),
            keys[:, of_head].astype(product),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        logits = jnp.where(mask, logits * (1.0 / math.sqrt(dim)), -jnp.inf)  # [S*G, T]
        top = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.dot(
            weights.astype(product), values[:, of_head].astype(product),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        outs.append(out / jnp.where(total > 0, total, 1.0))
        lses.append(jnp.where(total > 0, top + jnp.log(total), -jnp.inf)[:, 0])
    out = jnp.stack(outs).reshape(kv_heads, queries, group, dim).swapaxes(0, 1)
    lse = jnp.stack(lses).reshape(kv_heads, queries, group).swapaxes(0, 1)
    return out.reshape(queries, heads, dim), lse.reshape(queries, heads)
