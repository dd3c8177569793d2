"""IMPRESS's choice of tokens by a few probe heads, and whether to trust them (§4.3)."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ckv_jax.selection.base import top_mask

ALPHA = 0.6
"""Exponent of the threshold, the paper's choice (§4.3, Figure 22)."""


def similarity_threshold(share: np.ndarray | float) -> np.ndarray | float:
    """t = j^0.6, j the expected Jaccard index of two random choices of the same `share` = k/n.

    j = (k/n) / (2 - k/n). The probe heads are trusted where they agree better than this.
    """
    return (share / (2.0 - share)) ** ALPHA


def mean_jaccard(sets: Bool[Array, "P T"]) -> Float32[Array, ""]:
    """Mean over pairs of heads of |A and B| / |A or B|; 1.0 for a single head."""
    pairs = list(itertools.combinations(range(sets.shape[0]), 2))
    if not pairs:
        return jnp.ones((), jnp.float32)
    ratios = []
    for a, b in pairs:
        both = jnp.sum(sets[a] & sets[b], dtype=jnp.float32)
        either = jnp.sum(sets[a] | sets[b], dtype=jnp.float32)
        ratios.append(both / jnp.maximum(either, 1.0))
    return jnp.mean(jnp.stack(ratios))


def probe_sets(sums: Float32[Array, "P T"], n: int, limit: Int32[Array, ""]) -> Bool[Array, "P T"]:
    """Each probe head's own `limit` <= n most important tokens."""
    limits = jnp.broadcast_to(limit, (sums.shape[0],))
    return top_mask(sums, n, limits)


def votes(sums: Float32[Array, "P T"], sets: Bool[Array, "P T"]) -> Float32[Array, " T"]:
    """What the probe heads agree on: the number of heads that chose a token, ties by their sums.

    Sums of one head never exceed the number of its queries; they are scaled to below one vote.
    """
    total = jnp.sum(jnp.where(sums > -jnp.inf, sums, 0.0), axis=0)  # [T]
    below_one = total / (jnp.sum(total) + 1.0)
    ballots = jnp.sum(sets, axis=0, dtype=jnp.float32) + below_one
    return jnp.where(sums[0] > -jnp.inf, ballots, -jnp.inf)
