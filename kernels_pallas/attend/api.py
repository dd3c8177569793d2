"""Attention of the suffix over selected pages and over itself, straight from the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from ckv_jax.kernels_pallas.attend import reference
from ckv_jax.kernels_pallas.dispatch import Implementation, Kernel, dispatch
from ckv_jax.kernels_pallas.target import Target


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
      to k_new's dtype for the second matmul, except where the target `widens`.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: the implementation asked for by name cannot take these shapes.
    """
    args = (q, pages, k_table, v_table, lengths, k_new, v_new, q_start)
    _check(*args)
    out: Array
    lse: Array
    out, lse = dispatch("attend", implementation, implementations(q), target, *args)
    return out, lse


def attend_rows(
    q: Float[Array, "B S H D"],
    k_new: Float[Array, "B R KD"],
    v_new: Float[Array, "B R KD"],
    q_start: Int32[Array, " B"],
    *,
    target: Target,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B S H D"], Float32[Array, "B S H"]]:
    """`attend` over no pages: the dense attention of a prefill."""
    none = jnp.zeros((q.shape[0], 0), jnp.int32)
    page = jnp.zeros((1, 1, k_new.shape[2]), k_new.dtype)
    return attend(
        q, page, none, none, none, k_new, v_new, q_start,
        target=target, implementation=implementation,
    )  # fmt: skip


def _mosaic_gpu() -> Callable[..., Any]:
    from ckv_jax.kernels_pallas.attend.mosaic_gpu import attend

    return attend


def _tpu() -> Callable[..., Any]:
    from ckv_jax.kernels_pallas.attend.tpu import attend

    return attend


def _cpu() -> Callable[..., Any]:
    from ckv_jax.kernels_pallas.attend.cpu import attend

    return attend


IMPLEMENTATIONS: Mapping[str, Kernel] = MappingProxyType(
    {
        "mosaic_gpu": Kernel(_mosaic_gpu, platform="gpu"),
        "tpu": Kernel(_tpu, platform="tpu"),
        "reference": Kernel(lambda: reference.attend, multiplies=True),
    }
)
ONE_QUERY: Mapping[str, Kernel] = MappingProxyType(
    {"cpu": Kernel(_cpu, platform="cpu"), **IMPLEMENTATIONS}
)
"""Of one query a sequence, in bfloat16."""


def implementations(q: Array) -> Mapping[str, Kernel]:
    """What attends with such queries [B, S, H, D], in the order in which "auto" tries them."""
    return ONE_QUERY if q.shape[1] == 1 and q.dtype == jnp.bfloat16 else IMPLEMENTATIONS


def _check(
    q: Array,
    pages: Array,
    k_table: Array,
    v_table: Array,
    lengths: Array,
    k_new: Array,
    v_new: Array,
    q_start: Array,
) -> None:
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
