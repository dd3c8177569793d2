"""Equation 1 in jnp: the twin the kernels are tested against, and what a CPU runs.

The softmax runs over blocks of keys. Of each block only every chunk's sum of exponentials and
the block's maximum stay, [rows, M] in place of [rows, T]; one rescaling at the end makes the sums
exact. Matmuls go one KV head at a time with the G query heads folded into rows, which is the
fastest order on a CPU. Blocks keep the temporary memory of a call over several layers, logits and
decoded keys, below the 32 MiB from which the allocator maps fresh pages for every call: their
faults took longer than the scoring itself. Smaller blocks than that leave a second core with
nothing to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ckv_jax.kernels_pallas.score.probe import Int4Keys, Int8Keys, Keys, PqKeys, TokenProbe
from ckv_jax.kernels_pallas.score.rows import weights_of

__all__ = ["block_sums", "over_queries", "score"]

_BLOCK_BYTES = 8 * 2**20  # of float32 logits and of keys as decoded, all KV heads
_LONG_HALF = 64  # dims of half a key
_LOWEST = float(jnp.finfo(jnp.float32).min)


def score(
    q: Array,
    probe: TokenProbe,
    num_tokens: Array,
    q_lengths: Array,
    chunk_tokens: int,
    peaks: bool = False,
    *,
    widen: bool = False,
    block_bytes: int = _BLOCK_BYTES,
) -> Array:
    """See `api.score`; float32 [*2, B, K, M]. `widen`: multiplies in float32, see `Target.widens`.

    Keys go in blocks whose logits and decoded keys take at most `block_bytes`.
    """
    batch, queries, heads, dim = q.shape
    tokens, kv_heads, _ = probe.shape
    group = heads // kv_heads
    rows = q.reshape(batch * queries, kv_heads, group, dim).swapaxes(0, 1)  # [K, B*S, G, D]
    rows = rows.reshape(kv_heads, batch * queries * group, dim)
    product = jnp.dtype(jnp.float32) if widen else q.dtype
    chunks = tokens // chunk_tokens
    of_key = 4 * batch * queries * heads + product.itemsize * kv_heads * dim
    most = max(1, block_bytes // (of_key * chunk_tokens))
    if chunks <= most:
        part, top = block_sums(rows, probe, num_tokens, chunk_tokens, product)
        sums, tops = part[None], top[None]
    else:
        blocks = -(-chunks // most)
        # Blocks without padding, if there are: padding copies the whole probe.
        blocks = next((n for n in range(blocks, 2 * blocks) if chunks % n == 0), blocks)
        block = -(-chunks // blocks)
        starts = block * chunk_tokens * jnp.arange(blocks, dtype=jnp.int32)
        parts, join = _split(probe, blocks, blocks * block * chunk_tokens, q.dtype)
        sums, tops = lax.map(
            lambda item: block_sums(
                rows, join(*item[1:]), num_tokens - item[0], chunk_tokens, product
            ),
            (starts, *parts),
        )
    top = jnp.max(tops, axis=0)  # [K, rows]
    sums = sums * jnp.exp(tops - top[None])[..., None]  # [blocks, K, rows, chunks of a block]
    total = jnp.sum(sums, axis=(0, 3))
    share = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)  # [K, rows]
    weight = jnp.repeat(weights_of(q_lengths, queries, peaks).reshape(-1), group)[None, :]
    share = jnp.where(weight > 0, share * weight, 0.0)  # [K, rows]
    weighted = jnp.where(share[None, :, :, None] > 0, sums * share[None, :, :, None], 0.0)
    blocks_, width = sums.shape[0], sums.shape[3]
    weighted = weighted.reshape(blocks_, kv_heads, batch, queries * group, width)
    out = over_queries(weighted, peaks, axis=3)  # [1 or 2, blocks, K, B, width]
    out = out.transpose(0, 3, 2, 1, 4)
    out = out.reshape(-1, batch, kv_heads, blocks_ * width)[..., :chunks]
    return out if peaks else out[0]


def over_queries(share: Array, peaks: bool, axis: int) -> Array:
    """Sums of the queries' shares over an axis, [1, ...]; with `peaks` [2, ...], the sums of their
    squares behind them."""
    sums = [jnp.sum(share, axis=axis)]
    if peaks:
        sums.append(jnp.sum(jnp.square(share), axis=axis))
    return jnp.stack(sums)


def block_sums(
    rows: Array, probe: TokenProbe, num_tokens: Array, chunk: int, product: jnp.dtype
) -> tuple[Array, Array]:
    """rows [K, R, D] -> sums of exponentials [K, R, chunks], maxima [K, R], of these keys.

    `product`: the element type of what is multiplied, the rows' own or a wider one.
    """
    tokens, kv_heads, dim = probe.shape
    if isinstance(probe, PqKeys):
        probe = Keys(_look_up(probe, rows.dtype))
    valid = jnp.arange(tokens, dtype=jnp.int32)[None, :] < num_tokens
    sums, tops = [], []
    for head in range(kv_heads):
        logits, scale = _logits(rows[head], probe, head, product)
        factor = 1.0 / math.sqrt(dim)
        logits = logits * factor if scale is None else logits * (scale * factor)[None, :]
        logits = jnp.where(valid, logits, -jnp.inf)
        top = jnp.maximum(jnp.max(logits, axis=-1), _LOWEST)
        weights = jnp.exp(logits - top[:, None])
        sums.append(jnp.sum(weights.reshape(-1, tokens // chunk, chunk), axis=-1))
        tops.append(top)
    return jnp.stack(sums), jnp.stack(tops)


def _logits(
    rows: Array, probe: Keys | Int8Keys | Int4Keys, head: int, product: jnp.dtype
) -> tuple[Array, Array | None]:
    """rows [R, D] times one head's keys: float32 [R, T], and the factor [T] still to be applied."""
    exact, rows = rows.dtype, rows.astype(product)
    match probe:
        case Keys(keys):
            mine = keys[:, head]
            if jnp.issubdtype(keys.dtype, jnp.unsignedinteger):
                mine = lax.bitcast_convert_type(mine, exact)
            return _dot(rows, mine.astype(exact).astype(product)), None
        case Int8Keys(codes, scale):
            return _dot(rows, codes[:, head].astype(rows.dtype)), scale[:, head]
        case Int4Keys(codes, scale):
            # The offset of 8 is taken off the sums. Of long keys a product a nibble takes a CPU as
            # little as half the time that it takes to join the halves first; of short ones it is
            # the other way round.
            half = rows.shape[1] // 2
            low = (codes[:, head] & jnp.uint8(15)).astype(rows.dtype)
            high = (codes[:, head] >> jnp.uint8(4)).astype(rows.dtype)
            offset = 8 * jnp.sum(rows.astype(jnp.float32), axis=1, keepdims=True)
            if half < _LONG_HALF:
                logits = _dot(rows, jnp.concatenate([low, high], axis=1))
            else:
                logits = _dot(rows[:, :half], low) + _dot(rows[:, half:], high)
            return logits - offset, scale[:, head]


def _dot(rows: Array, keys: Array) -> Array:
    """[R, D] and [T, D] to float32 [R, T]."""
    return lax.dot_general(rows, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _look_up(probe: PqKeys, dtype: jnp.dtype) -> Array:
    """Keys [T, K, D] by gathering codebook entries, as 32-bit words where two values fill one:
    a CPU gathers those in half the time.
    """
    kv_heads, subspaces, size, width = probe.codebooks.shape
    books = probe.codebooks.astype(dtype).reshape(-1, width)
    if dtype.itemsize == 2 and width % 2 == 0:
        books = lax.bitcast_convert_type(books.reshape(-1, width // 2, 2), jnp.uint32)
    first = size * jnp.arange(kv_heads * subspaces, dtype=jnp.int32)
    entry = probe.codes.astype(jnp.int32) + first.reshape(1, kv_heads, subspaces)
    keys = jnp.take(books, entry, axis=0, mode="clip")
    if books.dtype != dtype:
        keys = lax.bitcast_convert_type(keys, dtype)
    return keys.reshape(-1, kv_heads, subspaces * width)


def _split(
    probe: TokenProbe, blocks: int, tokens: int, dtype: jnp.dtype
) -> tuple[tuple[Array, ...], Callable[..., TokenProbe]]:
    """Pads the tokens with zeros and splits them into `blocks`: arrays [blocks, T', ...], and
    what makes a probe of one block of each."""

    def cut(array: Array) -> Array:
        array = jnp.pad(array, ((0, tokens - array.shape[0]),) + ((0, 0),) * (array.ndim - 1))
        return array.reshape(blocks, tokens // blocks, *array.shape[1:])

    match probe:
        case Keys(keys):
            return (cut(_bits(keys, dtype)),), Keys
        case Int8Keys(codes, scale):
            return (cut(codes), cut(scale)), Int8Keys
        case Int4Keys(codes, scale):
            return (cut(codes), cut(scale)), Int4Keys
        case PqKeys(codes, codebooks):
            books = codebooks.astype(dtype)  # once, not in every block
            return (cut(codes),), lambda part: PqKeys(part, books)


def _bits(keys: Array, dtype: jnp.dtype) -> Array:
    """16-bit floats as integers: XLA's CPU backend copies the former to float32 around a loop."""
    if dtype.itemsize != 2 or not jnp.issubdtype(keys.dtype, jnp.floating):
        return keys
    return lax.bitcast_convert_type(keys.astype(dtype), jnp.uint16)
