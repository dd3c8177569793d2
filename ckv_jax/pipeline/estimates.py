"""Attention that the tokens of a text estimate, beside what they attend to exactly (RetroInfer).

Chunks that come after those of a choice are known by their mean keys and values alone. What a token
makes of them is a row of heads and its log-sum-exp, which attention to its choice is merged with
(`paged.py`). Inside a jitted call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32

from ckv_jax.kernels_pallas.attend.means import attend_means
from ckv_jax.kernels_pallas.score.probe import MeanKeys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.selection.base import top_mask


class Estimate(NamedTuple):
    """What the tokens of a batch made of chunks that they do not attend to exactly."""

    out: Float32[Array, "B 1 H D"]
    lse: Float32[Array, "B 1 H"]
    """-inf: nothing."""

    def put(self, rows: Int32[Array, " R"], new: Estimate) -> Estimate:
        """With those of some rows; of rows past the batch nothing is kept."""
        return Estimate(
            self.out.at[rows].set(new.out, mode="drop"), self.lse.at[rows].set(new.lse, mode="drop")
        )


def no_estimate(batch: int, heads: int, dim: int) -> Estimate:
    """Of rows that estimate nothing."""
    nothing = jnp.full((batch, 1, heads), -jnp.inf, jnp.float32)
    return Estimate(jnp.zeros((batch, 1, heads, dim), jnp.float32), nothing)


def next_best(
    ranked: Float32[Array, "R M"], ids: Int32[Array, "R n"], most: int, counts: Int32[Array, " R"]
) -> Bool[Array, "R M"]:
    """The `counts[r]` <= most best chunks of each row, by what ranks them, that are not among its
    `ids`, -1 being none."""
    units = ranked.shape[1]
    rows = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
    left = ranked.at[rows, jnp.where(ids < 0, units, ids)].set(-jnp.inf, mode="drop")
    return top_mask(left, most, counts)


def estimators(
    q: Array, probes: Sequence[Probe], seen: Bool[Array, "R M"], target: Target
) -> list[Callable[[], Estimate]]:
    """For each prefix, what the queries q [b, 1, H, D] over it make of the chunks that they have
    `seen`, a row of which each of a query's KV heads has. As many queries stand on each of the
    `probes`, one after the other."""
    size = len(q) // len(probes)
    by_head = seen.reshape(len(q), -1, seen.shape[1])  # [b, K, M]

    def of(place: int, probe: Probe) -> Callable[[], Estimate]:
        assert isinstance(probe, MeanKeys) and probe.value is not None
        mine, value = slice(place * size, (place + 1) * size), probe.value
        return lambda: Estimate(
            *attend_means(
                q[mine], probe.mean, probe.log_size, value, by_head[mine], widen=target.widens
            )
        )

    return [of(place, probe) for place, probe in enumerate(probes)]
