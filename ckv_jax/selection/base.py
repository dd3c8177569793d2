"""The best tokens of a score, as ids; every token selector ends here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32


def top_mask(
    scores: Float32[Array, "B T"], n: int, limits: Int32[Array, " B"]
) -> Bool[Array, "B T"]:
    """Which tokens are among the `limits[b]` <= n best of their row; of equals the earlier wins.

    Tokens that may never win carry -inf.
    """
    batch, tokens = scores.shape
    values, best = lax.top_k(scores, min(n, tokens))
    chosen = jnp.arange(best.shape[1], dtype=jnp.int32)[None, :] < limits[:, None]
    chosen = chosen & (values > -jnp.inf)
    rows = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], best.shape)
    return jnp.zeros((batch, tokens), bool).at[rows, best].set(chosen)


def top_tokens(
    scores: Float32[Array, "B T"], n: int, limits: Int32[Array, " B"]
) -> Int32[Array, "B n"]:
    """Ids of the `limits[b]` <= n best tokens of each row, ascending, then -1.

    Tokens that may never win carry -inf; of equals the earlier wins.
    """
    tokens = scores.shape[1]
    values, best = lax.top_k(scores, min(n, tokens))
    chosen = jnp.arange(best.shape[1], dtype=jnp.int32)[None, :] < limits[:, None]
    chosen = chosen & (values > -jnp.inf)
    ids = jnp.sort(jnp.where(chosen, best.astype(jnp.int32), tokens), axis=1)
    ids = jnp.where(ids < tokens, ids, -1)
    return jnp.pad(ids, ((0, 0), (0, n - ids.shape[1])), constant_values=-1)


def share_held(scores: Float32[Array, "B T"], ids: Int32[Array, "B n"]) -> Float32[Array, " B"]:
    """The share of each row's score (-inf counts for nothing) that the tokens `ids` hold."""
    scores = jnp.where(scores > -jnp.inf, scores, 0.0)
    held = jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=1)
    held = jnp.sum(jnp.where(ids >= 0, held, 0.0), axis=1)
    return held / jnp.maximum(jnp.sum(scores, axis=1), jnp.finfo(jnp.float32).tiny)


def chunk_counts(
    ids: Int32[Array, "B n"], *, chunk_tokens: int, chunks: int
) -> Int32[Array, "B M"]:
    """How many of the tokens `ids` (-1: none) lie in each chunk."""

    def of_row(row: Array) -> Array:
        where = jnp.where(row >= 0, row // chunk_tokens, chunks)
        return jnp.zeros((chunks,), jnp.int32).at[where].add(1, mode="drop")

    return jax.vmap(of_row)(ids)
