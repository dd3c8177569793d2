"""Choosing the next token: greedy, temperature, top-k and top-p, each request with its own seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

__all__ = ["SamplingArrays", "SamplingParams", "sample", "stack_params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request chooses tokens and when it ends.

    Token t of a request depends only on its logits, its seed and t: never on what else is in the
    batch.
    """

    temperature: float = 0.0
    """0 takes the most likely token; 1 samples the model's own distribution."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this share of probability."""
    top_k: int = 0
    """Only so many of the likeliest tokens; 0: all of them."""
    seed: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with any of these, besides the model's own end-of-text ids."""
    stop: tuple[str, ...] = ()
    """Generation ends before any of these strings."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"got temperature={self.temperature}, expected 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"got top_p={self.top_p}, expected a share in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"got top_k={self.top_k}, expected 0 (all) or more")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"got seed={self.seed}, expected 0 to 2**32 - 1")
        if self.max_tokens < 1:
            raise ValueError(f"got max_tokens={self.max_tokens}, expected at least 1")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"got stop_token_ids={self.stop_token_ids}, expected ids of 0 or more")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise ValueError(f"got stop={self.stop!r}, expected a tuple of non-empty strings")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """The parameters of a batch, as arguments of a jitted call."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    seed: UInt32[Array, " B"]


def stack_params(params: Sequence[SamplingParams]) -> SamplingArrays:
    """One entry for each request of a batch, in order."""
    return SamplingArrays(
        temperature=jnp.asarray(np.asarray([p.temperature for p in params], np.float32)),
        top_p=jnp.asarray(np.asarray([p.top_p for p in params], np.float32)),
        top_k=jnp.asarray(np.asarray([p.top_k for p in params], np.int32)),
        seed=jnp.asarray(np.asarray([p.seed for p in params], np.uint32)),
    )


@jax.jit
def sample(
    logits: Float[Array, "B V"], params: SamplingArrays, steps: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The next token of each request, int32; `steps` counts the tokens it has generated so far.

    Temperature 0 is the argmax (the lowest id among equals). Otherwise the logits are divided by
    the temperature, then cut to `top_k`, then to the smallest set that reaches `top_p` of what is
    left; one Gumbel draw from the request's seed and step chooses within it. The likeliest token
    is always in the set. A batch that is greedy throughout skips the sort.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, " B"]:
        drawn = jax.vmap(_draw)(logits, params, steps)
        return jnp.where(params.temperature > 0, drawn, greedy)

    tokens: Int[Array, " B"]
    tokens = jax.lax.cond(jnp.any(params.temperature > 0), draw, lambda: greedy)
    return tokens


def _draw(
    logits: Float[Array, " V"], params: SamplingArrays, step: Int[Array, ""]
) -> Int[Array, ""]:
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)
    order = jnp.argsort(-logits, stable=True)  # likeliest first, lowest id among equals
    scaled = (logits[order] - jnp.max(logits)) / temperature
    rank = jnp.arange(logits.shape[0])
    kept = (params.top_k == 0) | (rank < params.top_k)
    share = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf))
    before = jnp.cumsum(share) - share  # probability of everything likelier
    kept &= (before < params.top_p) | (params.top_p >= 1.0)
    key = jax.random.fold_in(jax.random.key(params.seed), step)
    noise = jax.random.gumbel(key, logits.shape)[order]  # by id: near-equals may swap ranks
    choice = jnp.argmax(jnp.where(kept | (rank == 0), scaled + noise, -jnp.inf))
    return order[choice].astype(jnp.int32)
