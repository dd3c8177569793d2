"""What a choice takes before all else, by its system's zones. Inside a jitted call."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from ckv_jax.kernels_pallas.score.probe import MeanKeys, Probe
from ckv_jax.selection.base import steady_chunks
from ckv_jax.selection.zones import Zones


def sure_chunks(
    zones: Zones, scores: Float32[Array, "R M"], probes: Sequence[Probe], num_tokens: Array,
    num_chunks: Array, chunk_tokens: int,
) -> Bool[Array, "R M"] | None:  # fmt: skip
    """The chunks that each row of `scores` always takes; None: none.

    `probes`: of each prefix the one that its rows were scored by, as many rows of each, with its
    heads one after the other; `num_tokens`, `num_chunks`: of each row's prefix, int32 [R] or one
    number.
    """
    sure = steady_chunks(scores, num_tokens, chunk_tokens) if zones.steady else None
    if not zones.outliers:
        return sure
    oddities = []
    for probe in probes:
        assert isinstance(probe, MeanKeys) and probe.oddity is not None
        queries = scores.shape[0] // len(probes) // probe.shape[1]
        oddities.append(jnp.tile(probe.oddity.T, (queries, 1)))
    count = jnp.broadcast_to(zones.outliers_of(num_chunks), scores.shape[:1])
    outliers: Array = jnp.concatenate(oddities) < count[:, None]
    return outliers if sure is None else sure | outliers
