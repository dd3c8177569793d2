"""Attention of the suffix over selected pages and itself, directly from the pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from ckv_jax.kernels_pallas.native.library import PORTABLE, native, native_is_fastest
from ckv_jax.kernels_pallas.target import Implementation, Kernel, Target, dispatch, imported


def attend(
    q: Float[Array, "B S H D"],
    pages: Float[Array, "P C KD"],
    k_table: Int32[Array, "B N"],
    v_table: Int32[Array, "B N"],
    lengths: Int32[Array, "B N"],
    k_new: Float[Array, "B R KD"],
    v_new: Float[Array, "B R KD"],
    q_start: Int32[Array, " B"],
    *,
    target: Target,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B S H D"], Float32[Array, "B S H"]]:
    """Softmax attention, scaled by 1/sqrt(D), over page tokens and the tokens of this request.

    Query i of sequence b sees the first `lengths[b, n]` tokens of every page n and
    `k_new[b, : q_start[b] + i + 1]`. Query head h uses KV head h // (H // K). Keys carry their
    RoPE already, so the order of pages does not matter.

    Args:
      pages: the pool as single pages, the keys *or* the values of one chunk and layer each, a
        token's K heads side by side; no page is looked at where N is 0;
        elements of k_new's dtype, or their bit patterns as unsigned integers of that width
        (XLA's CPU backend updates 16-bit floats by copying the whole array, integers in place).
      k_table, v_table: page numbers of keys and of values. A number outside [0, P) makes its
        entry invalid, as does `lengths[b, n] == 0`; whatever such pages hold is never used.
      k_new, v_new: keys and values computed in this request, R >= 0, as in pages.
      q_start: where query 0 stands in `k_new`.

    Returns:
      out in `q.dtype`, and the natural log-sum-exp of the scaled logits. Where a query sees
      nothing, out is 0 and lse is -inf. Accumulated in float32; the probabilities are rounded
      to k_new's dtype for the second matmul, except by the reference where the target `widens`.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: the implementation asked for by name cannot take these shapes.
    """
    if q.ndim != 4 or pages.ndim != 3 or k_new.ndim != 3 or k_table.ndim != 2:
        raise ValueError(
            f"got q {q.shape}, pages {pages.shape}, k_new {k_new.shape}, k_table {k_table.shape}, "
            "expected [B, S, H, D], [P, C, K*D], [B, R, K*D], [B, N]"
        )
    batch, _, heads, dim = q.shape
    count, _, width = pages.shape
    if width == 0 or width % dim or heads % (width // dim) or count == 0:
        raise ValueError(
            f"got q {q.shape} over pages {pages.shape}, expected rows of K*D with K | H, P > 0"
        )
    if k_new.shape != v_new.shape or (k_new.shape[0], k_new.shape[2]) != (batch, width):
        raise ValueError(
            f"got k_new {k_new.shape} and v_new {v_new.shape}, expected [{batch}, R, {width}] both"
        )
    bits = jnp.dtype(f"uint{8 * k_new.dtype.itemsize}")
    if k_new.dtype != v_new.dtype or pages.dtype not in (k_new.dtype, bits):
        raise ValueError(
            f"got k_new {k_new.dtype}, v_new {v_new.dtype}, pages {pages.dtype}, expected one "
            "dtype for all, or pages of its bit patterns"
        )
    table = (batch, k_table.shape[1])
    for name, array, shape in (
        ("k_table", k_table, table),
        ("v_table", v_table, table),
        ("lengths", lengths, table),
        ("q_start", q_start, (batch,)),
    ):
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"got {name} {array.dtype}{array.shape}, expected int32{shape}")
    args = (q, pages, k_table, v_table, lengths, k_new, v_new, q_start)
    out: Array
    lse: Array
    out, lse = dispatch("attend", implementation, implementations(q, target), target, *args)
    return out, lse


def attend_rows(
    q: Float[Array, "B S H D"],
    k_new: Float[Array, "B R KD"],
    v_new: Float[Array, "B R KD"],
    q_start: Int32[Array, " B"],
    *,
    target: Target,
) -> tuple[Float[Array, "B S H D"], Float32[Array, "B S H"]]:
    """`attend` over no pages: the dense attention of a prefill."""
    none = jnp.zeros((q.shape[0], 0), jnp.int32)
    page = jnp.zeros((1, 1, k_new.shape[2]), k_new.dtype)
    return attend(q, page, none, none, none, k_new, v_new, q_start, target=target)


IMPLEMENTATIONS: Mapping[str, Kernel] = MappingProxyType(
    {
        "mosaic_gpu": Kernel(imported("attend.mosaic_gpu", "attend"), platform="gpu"),
        "tpu": Kernel(imported("attend.tpu", "attend"), platform="tpu"),
        "reference": Kernel(lambda: reference, multiplies=True),
    }
)
ALSO_NATIVE: Mapping[str, Kernel] = MappingProxyType(
    {"cpu": Kernel(imported("cpu", "attend"), platform="cpu"), **IMPLEMENTATIONS}
)
"""Of bfloat16 on a CPU."""


def implementations(q: Array, target: Target) -> Mapping[str, Kernel]:
    """What attends with such queries [B, S, H, D], in the order in which "auto" tries them. Many
    queries, as of a prefill, are XLA's unless the native kernels are the fastest at bfloat16, and
    so is more than one where those are portable."""
    if target.platform != "cpu" or q.dtype != jnp.bfloat16:
        return IMPLEMENTATIONS
    most = 1 if native().level == PORTABLE else _QUESTION
    return ALSO_NATIVE if q.shape[1] <= most or native_is_fastest() else IMPLEMENTATIONS


def merge(
    outs: Sequence[Float[Array, "B S H D"]], lses: Sequence[Float32[Array, "B S H"]]
) -> tuple[Float[Array, "B S H D"], Float32[Array, "B S H"]]:
    """Merges the parts' outs by their natural log-sum-exps; float32 inside, outs[0].dtype out.

    A part that saw nothing (lse -inf) adds nothing; where none saw anything, out is 0, lse -inf.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"got {len(outs)} outs and {len(lses)} lses, expected as many, at least 1")
    top = jnp.maximum(jnp.max(jnp.stack(lses), axis=0), float(jnp.finfo(jnp.float32).min))
    weights = [jnp.exp(lse - top) for lse in lses]
    total = jnp.sum(jnp.stack(weights), axis=0)
    divisor = jnp.where(total > 0, total, 1.0)
    out = jnp.zeros(outs[0].shape, jnp.float32)
    for part, weight in zip(outs, weights, strict=True):
        out = out + part.astype(jnp.float32) * (weight / divisor)[..., None]
    return out.astype(outs[0].dtype), jnp.where(total > 0, top + jnp.log(divisor), -jnp.inf)


# -- the reference ---------------------------------------------------------------------------------

_LOGITS_BYTES = 2 * 2**20  # of one KV head's float32 logits at a time: what a CPU's caches hold
_WIDE_BYTES = 8 * 2**20  # the same where keys are widened again for every block
_PIECE = 512  # page tokens that a question attends to at a time
_QUESTION = 128  # queries at most


def reference(
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
) -> tuple[Array, Array]:
    """`attend` in jnp: the twin the kernels are tested against, and what a CPU runs.

    `widen`: multiplies in float32, see `Target.widens`. One matmul a KV head with the G query heads
    folded into its rows: on a CPU this avoids the transposed copy of the keys that a batched einsum
    makes, and is twice as fast.

    Sequences go one after the other: a loop compiles four times faster than eight copies of its
    body, and runs three times faster on a CPU, where they would compete for its caches. A question
    attends to pages piece by piece, up to the last entry that holds any: how wide a table is
    changes neither the time nor a bit.
    """

    def one(row: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k_table, v_table, lengths, k_new, v_new, q_start = row
        tail = k_new.shape[0]
        seen = jnp.arange(tail, dtype=jnp.int32) < q_start + q.shape[0]
        keys, values = k_new, jnp.where(seen[:, None], v_new, 0)  # [T, K*D]
        valid, parts = jnp.zeros(0, bool), []
        if q.shape[0] <= _QUESTION and k_table.shape[0] * pages.shape[1] > _PIECE:
            tables = k_table, v_table, lengths
            parts.append(_by_pieces(q, pages, tables, k_new.dtype, widen))
        elif k_table.shape[0]:
            old_keys, old_values, valid = _context(pages, k_table, v_table, lengths, k_new.dtype)
            keys = jnp.concatenate([old_keys, keys], axis=0)
            values = jnp.concatenate([old_values, values], axis=0)
        last = q_start + jnp.arange(q.shape[0], dtype=jnp.int32)
        parts.append(_by_query_blocks(q, keys, values, valid, last, widen))
        out, lse = merge(*zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
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
    out, _ = _by_query_blocks(q, keys, values, no_pages, last, False)
    return out.astype(q.dtype)


def _by_pieces(
    q: Array, pages: Array, tables: tuple[Array, Array, Array], dtype: jnp.dtype, widen: bool
) -> tuple[Array, Array]:
    """One sequence's attention to its pages alone, float32 [S, H, D], and its log-sum-exp [S, H].

    `tables`: of keys, of values, and lengths, int32 [N] each.
    """
    size = max(1, _PIECE // pages.shape[1])
    k_table, v_table, lengths = (jnp.pad(one, (0, -len(one) % size)) for one in tables)
    nothing_after = jnp.zeros(q.shape[0], jnp.int32)

    def add(piece: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        keys_at, values_at, held = (
            lax.dynamic_slice_in_dim(one, piece * size, size) for one in (k_table, v_table, lengths)
        )
        keys, values, valid = _context(pages, keys_at, values_at, held, dtype)
        out, lse = _by_query_blocks(q, keys, values, valid, nothing_after, widen)
        return merge((found[0], out), (found[1], lse))

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    places = jnp.arange(1, len(lengths) + 1, dtype=jnp.int32)
    used = jnp.max(jnp.where(lengths > 0, places, 0))
    found: tuple[Array, Array] = lax.fori_loop(0, -(-used // size), add, nothing)
    return found


def _context(
    pages: Array, k_table: Array, v_table: Array, lengths: Array, dtype: jnp.dtype
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
    q: Array, keys: Array, values: Array, valid: Array, last: Array, widen: bool
) -> tuple[Array, Array]:
    """One sequence: q [S, H, D], keys and values [T, K*D] -> float32 out [S, H, D], lse [S, H].

    Queries go in blocks whose logits of one KV head take about a fixed number of bytes.

    Query i sees the keys that are `valid`, and of those after them up to number `last[i]`.
    """
    queries, heads, dim = q.shape
    tokens, kv_heads = keys.shape[0], keys.shape[1] // dim
    if tokens == 0:
        nothing = jnp.zeros(q.shape, jnp.float32)
        return nothing, jnp.full((queries, heads), -jnp.inf, jnp.float32)
    logits_bytes = _WIDE_BYTES if widen else _LOGITS_BYTES
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
