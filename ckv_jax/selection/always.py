"""What every selection holds outside of its budget: a prefix's first tokens and its last ones.

A trained model gives its first tokens a third of all attention whatever is asked (StreamingLLM's
sinks), and its latest ones much of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckv_jax.errors import check_whole
from ckv_jax.storage.grouping import FIRST, LAST
from ckv_jax.storage.layout import Layout

if TYPE_CHECKING:  # load jax
    from jax import Array
    from jaxtyping import Bool, Float32

    from ckv_jax.kernels_pallas.score.probe import Probe


class Always(Protocol):
    """Chunks that are always selected; hashable, as programs are compiled for it."""

    def most(self, layout: Layout, tokens: int) -> int:
        """The most chunks of a prefix of so many tokens that it adds to a selection."""
        ...

    def chunks(
        self,
        scores: Float32[Array, "R M"],
        probes: Sequence[Probe],
        num_tokens: Array,
        num_chunks: Array,
        limits: Array,
        chunk_tokens: int,
    ) -> Bool[Array, "R M"] | None:
        """Those of each row of `scores`, inside a jitted call; None: none.

        `probes`: of each prefix the one that its rows were scored by, as many rows of each, with
        its heads one after the other; `num_tokens`, `num_chunks`: of each row's prefix, int32 [R]
        or one number; `limits`: chunks that each row selects, what is always selected among them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Nothing:
    """No chunk is selected but for its score."""

    def most(self, layout: Layout, tokens: int) -> int:
        """None."""
        return 0

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> None:  # fmt: skip
        """None."""
        return


@dataclass(frozen=True, slots=True)
class Ends:
    """The chunks that hold some of a prefix's first and last tokens."""

    first: int = FIRST
    """Tokens of the prefix's beginning."""
    last: int = LAST
    """Tokens of its end."""

    def __post_init__(self) -> None:
        check_whole("first", self.first, least=1)
        check_whole("last", self.last, least=1)

    def most(self, layout: Layout, tokens: int) -> int:
        """Both ends."""
        size, chunks = layout.chunk_tokens, layout.num_chunks(tokens)
        tail = max(0, tokens - self.last) // size
        return min(chunks, -(-self.first // size) + chunks - tail)

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> Array:  # fmt: skip
        """Both ends of each row's prefix."""
        import jax.numpy as jnp

        rows, chunks = scores.shape
        start = jnp.arange(chunks, dtype=jnp.int32)[None, :] * chunk_tokens
        end = jnp.broadcast_to(num_tokens, (rows,))[:, None]
        held: Array = (start < self.first) | (
            (start + chunk_tokens > end - self.last) & (start < end)
        )
        return held


NOTHING = Nothing()
