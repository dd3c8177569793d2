"""`Zones`: what a choice of chunks has beside its budget: chunks that are always attended to, and
chunks of which attention is only estimated."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from ckv_jax.selection.select import Select
from ckv_jax.storage.layout import Layout
from ckv_jax.validate import check_number

if TYPE_CHECKING:  # loads jax
    from jax import Array

Count = TypeVar("Count", int, "Array")

_FINEST = 1024
"""Shares are of so many parts at most: counts come of whole numbers, here and on the device."""


@dataclass(frozen=True, slots=True)
class Zones:
    """The zones of a system's choices; the budget counts none of them."""

    steady: bool = False
    """A text's first and last tokens are always attended to (`grouping.py`)."""
    outliers: float = 0.0
    """As is, for each KV head, this share of a prefix's chunks: those that a mean says least of."""
    estimate: float = 0.0
    """The share of a prefix's chunks, the next best after those of a choice, whose attention is
    estimated."""

    def __post_init__(self) -> None:
        for name in ("estimate", "outliers"):
            share = getattr(self, name)
            check_number(name, share)
            if not 0 <= share <= 1:
                raise ValueError(f"got {name}={share}, expected a share of the chunks in [0, 1]")

    def check(self, *, digest: str, each: bool, decode: Select | None) -> None:
        """Raises `ValueError` where a system cannot have them. `each`: every head of every layer
        chooses for itself."""
        for name, needs in (("estimate", "means+values"), ("outliers", "means+cosines")):
            share = getattr(self, name)
            if share and digest != needs:
                raise ValueError(
                    f"got {name}={share} with digest={digest!r}, expected digest={needs!r}, with "
                    "which texts have to be ingested"
                )
            if share and not each:
                raise ValueError(
                    f"got {name}={share}, expected heads_apart=True and period=1: each head of "
                    "every layer by itself"
                )
        own = decode is not None and not decode.guessed
        if self.estimate and not (own and decode and decode.every == 1 and decode.drift is None):
            raise ValueError(
                f"got estimate={self.estimate} with decode={decode}, expected one by which every "
                "token chooses for every layer by the layer's own queries"
            )

    def always(self, layout: Layout, tokens: int) -> int:
        """The most chunks of a prefix that a choice holds beside its budget."""
        steady = layout.steady_chunks(tokens) if self.steady else 0
        return steady + self.outliers_of(layout.num_chunks(tokens))

    def outliers_of(self, chunks: Count) -> Count:
        """Outliers among so many chunks."""
        return _share(self.outliers, chunks)

    def estimated_of(self, chunks: Count) -> Count:
        """Chunks that are estimated, of so many."""
        return _share(self.estimate, chunks)


NO_ZONES = Zones()


def _share(share: float, chunks: Count) -> Count:
    part = Fraction(share).limit_denominator(_FINEST)
    return -(-chunks * part.numerator // part.denominator)
