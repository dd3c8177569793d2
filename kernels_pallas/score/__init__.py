"""Chunk scores of Equation 1 (ContiguousKV section 4.4).

`reference` is Equation 1 in jnp: the twin the kernels are tested against, and what a CPU runs. Its
softmax runs over blocks of keys. Of each block only every chunk's sum of exponentials and
the block's maximum stay, [rows, M] in place of [rows, T]; one rescaling at the end makes the sums
exact. Matmuls go one KV head at a time with the G query heads folded into rows, which is the
fastest order on a CPU. Blocks keep the temporary memory of a call over several layers, logits and
decoded keys, below the 32 MiB from which the allocator maps fresh pages for every call: their
faults took longer than the scoring itself. Smaller blocks than that leave a second core with
nothing to do.

Landmarks take one product with the queries and a softmax over M = T / C logits a row, little enough
for XLA on every device: they have no kernel.

Several documents are scored under one softmax with queries of their own. A key that is to stand
`offset` tokens further on is rotated by that offset; its product with a query is that of the key as
it is and the query rotated back. So queries move and probes stay as they are, which is exact for
every kind of probe. Each document's exponentials are summed by chunk, and joined as blocks are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from ckv_jax.kernels_pallas.score.probe import (
    BoundKeys,
    Int4Keys,
    Keys,
    Landmarks,
    MeanKeys,
    PqKeys,
    Probe,
    TokenProbe,
    of_chunks,
    valid_queries,
    weights_of,
)
from ckv_jax.kernels_pallas.target import Implementation, Kernel, Target, dispatch, imported


def score(
    q: Float[Array, "B S H D"],
    probe: Probe,
    *,
    num_tokens: Int32[Array, ""],
    q_lengths: Int32[Array, " B"],
    chunk_tokens: int,
    target: Target,
    peaks: bool = False,
    chunk_ids: Int32[Array, " n"] | None = None,
    implementation: Implementation = "auto",
) -> Float32[Array, "*2 B K M"]:
    """Attention mass of each chunk: softmax(q.k / sqrt(D)) over the prefix, summed over the
    chunk's tokens, the query heads of each KV head and all valid queries.

    The sum over chunks is G * q_lengths[b] when num_tokens > 0. No `[H, S, T]` array is made, but
    on a GPU with `peaks`. A probe of landmarks gives the softmax over chunks of what
    `score_landmarks` says of each.

    Args:
      q: RoPE applied; a probe over the first K' KV heads goes with its K' * G query heads.
      probe: `T` keys, a multiple of `chunk_tokens`, or `M` landmarks; what stands past `num_tokens`
        is ignored.
      num_tokens: int32 scalar, how many tokens belong to the prefix.
      q_lengths: query i of sequence b counts if i < q_lengths[b].
      peaks: each query's mass is weighed by 1 / (1 + d), d queries before its row's last, and the
        result is [2, B, K, M]: the sums of these masses, and the sums of their squares, in which a
        chunk that one query of one head looks up comes first.
      chunk_ids: the probe's chunks that count, -1 past their end; None: all. `num_tokens` and the
        result are then of these, one after the other: M = n.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: the implementation asked for by name cannot take these shapes.
    """
    _check(q, probe, num_tokens, q_lengths, chunk_tokens)
    args: tuple[Any, ...] = (q, probe, num_tokens, q_lengths, chunk_tokens, peaks)
    kernels = implementations(probe)
    if chunk_ids is not None:
        args += (chunk_ids,)
        kernels = {key: one if key == "cpu" else _gathers(one) for key, one in kernels.items()}
    out: Array = dispatch("score", implementation, kernels, target, *args)
    return out


def _gathers(kernel: Kernel) -> Kernel:
    """The same kernel over a probe's chunks `chunk_ids`, which are copied together first."""

    def load() -> Callable[..., Any]:
        run = kernel.load()

        def gathered(
            q: Array, probe: Probe, num_tokens: Array, q_lengths: Array, chunk_tokens: int,
            peaks: bool, chunk_ids: Array, **more: Any,
        ) -> Array:  # fmt: skip
            few = of_chunks(probe, chunk_ids, chunk_tokens)
            out: Array = run(q, few, num_tokens, q_lengths, chunk_tokens, peaks, **more)
            return out

        return gathered

    return replace(kernel, load=load)


IMPLEMENTATIONS: Mapping[str, Kernel] = MappingProxyType(
    {
        "mosaic_gpu": Kernel(imported("score.mosaic_gpu", "score"), platform="gpu"),
        "tpu": Kernel(imported("score.tpu", "score"), platform="tpu"),
        "cpu": Kernel(imported("cpu", "score"), platform="cpu"),
        "reference": Kernel(lambda: reference, multiplies=True),
    }
)
"""Of int4 keys; `implementations` has those of other probes."""


def implementations(probe: Probe) -> Mapping[str, Kernel]:
    """What scores a probe, in the order in which "auto" tries them."""
    match probe:
        case MeanKeys() | BoundKeys():
            return {"reference": Kernel(lambda: score_landmarks, multiplies=True)}
        case Keys():
            return {name: one for name, one in IMPLEMENTATIONS.items() if name != "cpu"}
        case PqKeys():  # a kernel that decoded them by matmul took 4.6 times as long on an H200
            return {"reference": IMPLEMENTATIONS["reference"]}
        case Int4Keys():
            return IMPLEMENTATIONS


def _check(q: Array, probe: Probe, num_tokens: Array, q_lengths: Array, chunk_tokens: int) -> None:
    tokens, kv_heads, dim = probe.shape
    if q.ndim != 4 or q.shape[2] % kv_heads or q.shape[3] != dim:
        raise ValueError(f"got q {q.shape}, expected [B, S, H, {dim}] with {kv_heads} | H")
    every = 1 if isinstance(probe, Landmarks) else chunk_tokens
    if chunk_tokens < 1 or tokens == 0 or tokens % every:
        raise ValueError(f"got {tokens} keys, expected a multiple of chunk_tokens {chunk_tokens}")
    if q_lengths.shape != q.shape[:1] or q_lengths.dtype != jnp.int32:
        raise ValueError(
            f"got q_lengths {q_lengths.dtype}{q_lengths.shape}, expected int32{q.shape[:1]}"
        )
    if num_tokens.shape != () or num_tokens.dtype != jnp.int32:
        raise ValueError(
            f"got num_tokens {num_tokens.dtype}{num_tokens.shape}, expected an int32 scalar"
        )
    match probe:
        case Int4Keys(_, scale):
            if scale.shape != (tokens, kv_heads):
                raise ValueError(f"got scale {scale.shape}, expected {(tokens, kv_heads)}")
        case PqKeys(codes, codebooks):
            expected = (kv_heads, codes.shape[2], 256)
            if codebooks.shape[:3] != expected:
                raise ValueError(f"got codebooks {codebooks.shape}, expected {expected} + (Dsub,)")
        case MeanKeys(_, log_size):
            if log_size.shape != (tokens, kv_heads):
                raise ValueError(f"got log_size {log_size.shape}, expected {(tokens, kv_heads)}")
        case BoundKeys(low, high):
            if low.shape != high.shape:
                raise ValueError(f"got low {low.shape} and high {high.shape}, expected the same")
        case Keys(keys):
            bits = jnp.dtype(f"uint{8 * q.dtype.itemsize}")
            if not jnp.issubdtype(keys.dtype, jnp.floating) and keys.dtype != bits:
                raise ValueError(f"got keys {keys.dtype}, expected floats or {bits} bit patterns")


# -- the reference ---------------------------------------------------------------------------------

_BLOCK_BYTES = 8 * 2**20  # of a block's float32 logits and its keys as decoded, all KV heads
_LONG_HALF = 64  # dims of half a key
_LOWEST = float(jnp.finfo(jnp.float32).min)


def reference(
    q: Array,
    probe: TokenProbe,
    num_tokens: Array,
    q_lengths: Array,
    chunk_tokens: int,
    peaks: bool = False,
    *,
    widen: bool = False,
) -> Array:
    """See `score`; float32 [*2, B, K, M]. `widen`: multiplies in float32, see `Target.widens`."""
    batch, queries, heads, dim = q.shape
    tokens, kv_heads, _ = probe.shape
    group = heads // kv_heads
    rows = _rows(q, kv_heads)
    product = jnp.dtype(jnp.float32) if widen else q.dtype
    chunks = tokens // chunk_tokens
    of_key = 4 * batch * queries * heads + product.itemsize * kv_heads * dim
    most = max(1, _BLOCK_BYTES // (of_key * chunk_tokens))
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


def _rows(q: Array, kv_heads: int) -> Array:
    """q [B, S, H, D] -> rows [K, B*S*G, D]."""
    batch, queries, heads, dim = q.shape
    rows = q.reshape(batch * queries, kv_heads, heads // kv_heads, dim).swapaxes(0, 1)
    return rows.reshape(kv_heads, -1, dim)


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
    rows: Array, probe: Keys | Int4Keys, head: int, product: jnp.dtype
) -> tuple[Array, Array | None]:
    """rows [R, D] times one head's keys: float32 [R, T], and the factor [T] still to be applied."""
    exact, rows = rows.dtype, rows.astype(product)
    match probe:
        case Keys(keys):
            mine = keys[:, head]
            if jnp.issubdtype(keys.dtype, jnp.unsignedinteger):
                mine = lax.bitcast_convert_type(mine, exact)
            return dot(rows, mine.astype(exact).astype(product)), None
        case Int4Keys(codes, scale):
            # The offset of 8 is taken off the sums. Of long keys a product a nibble takes a CPU as
            # little as half the time that it takes to join the halves first; of short ones it is
            # the other way round.
            half = rows.shape[1] // 2
            low = (codes[:, head] & jnp.uint8(15)).astype(rows.dtype)
            high = (codes[:, head] >> jnp.uint8(4)).astype(rows.dtype)
            offset = 8 * jnp.sum(rows.astype(jnp.float32), axis=1, keepdims=True)
            if half < _LONG_HALF:
                logits = dot(rows, jnp.concatenate([low, high], axis=1))
            else:
                logits = dot(rows[:, :half], low) + dot(rows[:, half:], high)
            return logits - offset, scale[:, head]


def dot(rows: Array, keys: Array) -> Array:
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


def score_landmarks(
    q: Array,
    probe: Landmarks,
    num_tokens: Array,
    q_lengths: Array,
    chunk_tokens: int,
    peaks: bool = False,
    *,
    widen: bool = False,
) -> Array:
    """See `score`; float32 [*2, B, K, M]. `widen`: multiplies in float32, see `Target.widens`.

    A chunk's logit is q.mean + log(size), or the greatest that q.k can be for keys k within the
    chunk's bounds, sum over dims of max(q low, q high).
    """
    rows = _rows(valid_queries(q, q_lengths), probe.shape[1])
    if widen:
        rows = rows.astype(jnp.float32)
    weights, _ = landmark_sums(rows, probe, num_tokens, chunk_tokens)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    share = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)
    return _by_sequence(share, q, q_lengths, peaks)


def _by_sequence(share: Array, q: Array, q_lengths: Array, peaks: bool) -> Array:
    """Each row's shares of its attention [K, B*S*G, M] -> float32 [*2, B, K, M]."""
    batch, queries, heads, _ = q.shape
    kv_heads, _, chunks = share.shape
    weight = weights_of(q_lengths, queries, peaks).reshape(-1)
    weight = jnp.repeat(weight, heads // kv_heads)[None, :, None]
    share = jnp.where(weight > 0, share * weight, 0.0)
    by_sequence = share.reshape(kv_heads, batch, -1, chunks)
    out = over_queries(by_sequence, peaks, axis=2).swapaxes(1, 2)
    return out if peaks else out[0]


def landmark_sums(
    rows: Array, probe: Landmarks, num_tokens: Array, chunk_tokens: int
) -> tuple[Array, Array]:
    """rows [K, R, D] -> exponentials [K, R, M] of every chunk's logit, less the maxima [K, R]."""
    chunks, _, dim = probe.shape
    scale = 1.0 / math.sqrt(dim)
    if isinstance(probe, MeanKeys):
        logits = _dot_landmarks(rows, probe.mean) * scale + probe.log_size.T[:, None, :]
    else:
        zero = jnp.zeros((), rows.dtype)
        above = _dot_landmarks(jnp.maximum(rows, zero), probe.high)
        logits = (above + _dot_landmarks(jnp.minimum(rows, zero), probe.low)) * scale
    held = jnp.arange(chunks, dtype=jnp.int32) * chunk_tokens < num_tokens
    logits = jnp.where(held[None, None, :], logits, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=-1), _LOWEST)
    return jnp.exp(logits - top[..., None]), top


def _dot_landmarks(rows: Array, landmarks: Array) -> Array:
    """[K, R, D] and [M, K, D] to float32 [K, R, M]."""
    dims = (((2,), (2,)), ((0,), (1,)))
    landmarks = landmarks.astype(rows.dtype)
    return lax.dot_general(rows, landmarks, dims, preferred_element_type=jnp.float32)


def score_together(
    queries: Sequence[Float[Array, "1 S H D"]],
    probes: Sequence[Probe],
    *,
    num_tokens: Int32[Array, " n"],
    q_length: Int32[Array, ""],
    chunk_tokens: int,
) -> Float32[Array, "1 M"]:
    """Attention mass of each chunk, as `score` with all heads, but over all texts together.

    `queries[i]`: the same ones, with RoPE as at the place where `probes[i]` sees them. M is the
    sum of the probes' chunks, one text's after the other's; those past a text's end get 0. The sum
    over all is H * q_length.
    """
    _, count, heads, _ = queries[0].shape
    kv_heads = probes[0].shape[1]
    found, tops = [], []
    for index, (q, probe) in enumerate(zip(queries, probes, strict=True)):
        rows = _rows(q, kv_heads)
        if isinstance(probe, Landmarks):
            part, top = landmark_sums(rows, probe, num_tokens[index], chunk_tokens)
        else:
            part, top = block_sums(rows, probe, num_tokens[index], chunk_tokens, rows.dtype)
        found.append(part)
        tops.append(top)
    top = jnp.max(jnp.stack(tops), axis=0)  # [K, rows]
    every = jnp.concatenate(
        [part * jnp.exp(own - top)[..., None] for part, own in zip(found, tops, strict=True)],
        axis=-1,
    )  # [K, rows, M]
    total = jnp.sum(every, axis=-1, keepdims=True)
    counted = jnp.arange(count, dtype=jnp.int32) < q_length
    counted = jnp.repeat(counted, heads // kv_heads)[None, :, None]
    share = jnp.where(counted & (total > 0), 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
    return jnp.sum(every * share, axis=(0, 1))[None]


def best(
    scores: Float32[Array, "B M"],
    n: int,
    ages: Int32[Array, "B M"] | None = None,
    *,
    target: Target | None,
    implementation: Implementation = "auto",
) -> tuple[Float32[Array, "B n"], Int32[Array, "B n"]]:
    """The n <= M best scores of each row, best first, and their places.

    Of equals the one with the least of `ages` comes first; of equals in both the earlier one.
    Scores are not NaN. `target`: None, or no CPU: XLA's own sorts.

    Raises:
      ValueError: n > M, or ages of another shape or dtype.
      NotImplementedError: the implementation asked for by name does not run here.
    """
    if n > scores.shape[1]:
        raise ValueError(f"got n={n}, expected at most {scores.shape[1]}")
    if ages is not None and (ages.shape != scores.shape or ages.dtype != jnp.int32):
        raise ValueError(f"got ages {ages.dtype}{ages.shape}, expected int32{scores.shape}")
    if implementation == "auto" and (target is None or not target.in_host_memory):
        return best_by_xla(scores, n, ages)
    if target is None:
        raise NotImplementedError(f"got no target, expected one for {implementation!r}")
    return dispatch("best", implementation, BEST, target, scores, n, ages)  # type: ignore[no-any-return]


def best_by_xla(
    scores: Array, n: int, ages: Array | None = None
) -> tuple[Float32[Array, "B n"], Int32[Array, "B n"]]:
    """See `best`."""
    if ages is None:
        values, ids = lax.top_k(scores, n)
        return values, ids
    order = jnp.lexsort((ages, -scores), axis=-1)[:, :n].astype(jnp.int32)
    return jnp.take_along_axis(scores, order, axis=1), order


BEST: Mapping[str, Kernel] = MappingProxyType(
    {
        "cpu": Kernel(imported("cpu", "best"), platform="cpu"),
        "reference": Kernel(lambda: best_by_xla),
    }
)
"""XLA's sorts go row by row on one core of a CPU."""
