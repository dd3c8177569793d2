"""Chunk scores of Equation 1 (ContiguousKV section 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from ckv_jax.kernels_pallas.dispatch import Implementation, Kernel, dispatch
from ckv_jax.kernels_pallas.score import reference
from ckv_jax.kernels_pallas.score.probe import (
    BoundKeys,
    Int4Keys,
    Keys,
    Landmarks,
    MeanKeys,
    PqKeys,
    Probe,
    TurnedKeys,
)
from ckv_jax.kernels_pallas.target import Target


def score(
    q: Float[Array, "B S H D"],
    probe: Probe,
    *,
    num_tokens: Int32[Array, ""],
    q_lengths: Int32[Array, " B"],
    chunk_tokens: int,
    target: Target,
    heads: Literal["all", "each"] = "all",
    peaks: bool = False,
    implementation: Implementation = "auto",
) -> Float32[Array, "*2 B J M"]:
    """Attention mass of each chunk: softmax(q.k / sqrt(D)) over the prefix, summed over the
    chunk's tokens, the query heads and all valid queries.

    Over all heads together (J = 1) the sum over chunks is H * q_lengths[b] when num_tokens > 0,
    for each KV head by itself (J = K) it is G * q_lengths[b]. No `[H, S, T]` array is made, but on
    a GPU with `peaks`. A probe of landmarks gives the softmax over chunks of what
    `reference.score_landmarks` says of each.

    Args:
      q: RoPE applied; a probe over the first K' KV heads goes with its K' * G query heads.
      probe: `T` keys, a multiple of `chunk_tokens`, or `M` landmarks; what stands past `num_tokens`
        is ignored.
      num_tokens: int32 scalar, how many tokens belong to the prefix.
      q_lengths: query i of sequence b counts if i < q_lengths[b].
      heads: pooled, or each KV head with its G query heads.
      peaks: each query's mass is weighed by 1 / (1 + d), d queries before its row's last, and the
        result is [2, B, J, M]: the sums of these masses, and the sums of their squares, in which a
        chunk that one query of one head looks up comes first.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: the implementation asked for by name cannot take these shapes.
    """
    _check(q, probe, num_tokens, q_lengths, chunk_tokens)
    args = (q, probe, num_tokens, q_lengths, chunk_tokens, peaks)
    out: Array = dispatch(
        "score", implementation, implementations(probe), target, *args
    )  # [*2, B, K, M]
    return out if heads == "each" else jnp.sum(out, axis=-2, keepdims=True)


def _cpu() -> Callable[..., Any]:
    from ckv_jax.kernels_pallas.score.cpu import score

    return score


def _mosaic_gpu() -> Callable[..., Any]:
    from ckv_jax.kernels_pallas.score.mosaic_gpu import score

    return score


def _tpu() -> Callable[..., Any]:
    from ckv_jax.kernels_pallas.score.tpu import score

    return score


IMPLEMENTATIONS: Mapping[str, Kernel] = MappingProxyType(
    {
        "mosaic_gpu": Kernel(_mosaic_gpu, platform="gpu"),
        "tpu": Kernel(_tpu, platform="tpu"),
        "cpu": Kernel(_cpu, platform="cpu"),
        "reference": Kernel(lambda: reference.score, multiplies=True),
    }
)
"""Of probes with a key for each token."""
WITHOUT_CODES: Mapping[str, Kernel] = MappingProxyType(
    {name: kernel for name, kernel in IMPLEMENTATIONS.items() if name != "cpu"}
)
"""Of exact and of product-quantised keys, for which a CPU has the reference alone."""
LANDMARKS: Mapping[str, Kernel] = MappingProxyType(
    {"reference": Kernel(lambda: reference.score_landmarks, multiplies=True)}
)
"""Of landmarks."""
TURNED: Mapping[str, Kernel] = MappingProxyType(
    {"cpu": Kernel(_cpu, platform="cpu"), "reference": Kernel(lambda: reference.score_turned)}
)
"""Of turned keys."""


def implementations(probe: Probe) -> Mapping[str, Kernel]:
    """What scores a probe, in the order in which "auto" tries them."""
    match probe:
        case MeanKeys() | BoundKeys():
            return LANDMARKS
        case TurnedKeys():
            return TURNED
        case Keys() | PqKeys():
            return WITHOUT_CODES
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
