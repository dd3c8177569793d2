"""Attention over the union of disjoint parts, from what each part gave."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

__all__ = ["merge"]


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
