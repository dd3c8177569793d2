"""Recorded choices run through windows: what each width would have had to fetch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ckv_jax.decode.eviction import Choice, Keep, Window, advance, empty_window

__all__ = ["misses_by_width", "replay"]


@partial(jax.jit, static_argnames="keep")
def replay(
    window: Window, ids: Int32[Array, "T R N"], scores: Float32[Array, "T R M"], keep: Keep
) -> Int32[Array, "T R"]:
    """Chunks that each of T steps fetches, from `window` on; arguments as `Choice` has them."""

    def step(held: Window, inputs: tuple[Array, Array, Array]) -> tuple[Window, Array]:
        number, chosen, scored = inputs
        held, moves = advance(held, Choice(chosen, scored), number, keep)
        return held, jnp.sum(moves.misses >= 0, axis=1, dtype=jnp.int32)

    numbers = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return jax.lax.scan(step, window, (numbers, ids, scores))[1]


def misses_by_width(
    ids: Int32[np.ndarray, "T S R N"],
    scores: Float32[np.ndarray, "T S R M"],
    widths: Int32[np.ndarray, " O"],
    keep: Keep,
    *,
    skip: int = 0,
) -> np.ndarray:
    """Misses int64 [R, O] of each row at each width, over S sequences of T steps.

    Every sequence begins with an empty window; its first `skip` steps fill it and are not counted.

    Raises:
      ValueError: a width that cannot hold one choice.
    """
    steps, sequences, rows, count = ids.shape
    limits = np.full(sequences * rows, count, np.int32)
    flat = jnp.asarray(ids.reshape(steps, -1, count))
    scored = jnp.asarray(scores.reshape(steps, sequences * rows, -1))
    found = []
    for width in widths:
        # Slots as many as the widest has: one program serves all widths.
        window = empty_window(np.full_like(limits, width), limits, slots=int(widths.max()))
        missed = np.asarray(replay(window, flat, scored, keep))[skip:]
        found.append(missed.reshape(-1, sequences, rows).sum((0, 1), dtype=np.int64))
    return np.stack(found, axis=1)
