"""`Zones`: chunks that are always attended to, beside a choice's budget."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from ckv_jax.errors import check_number
from ckv_jax.storage.layout import Layout

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

    def __post_init__(self) -> None:
        check_number("outliers", self.outliers)
        if not 0 <= self.outliers <= 1:
            raise ValueError(
                f"got outliers={self.outliers}, expected a share of the chunks in [0, 1]"
            )

    def check(self, *, digest: str, each: bool) -> None:
        """Raises `ValueError` where a system cannot have them. `each`: every head of every layer
        chooses for itself."""
        if self.outliers and digest != "means+cosines":
            raise ValueError(
                f"got outliers={self.outliers} with digest={digest!r}, expected "
                "digest='means+cosines', with which texts have to be ingested"
            )
        if self.outliers and not each:
            raise ValueError(
                f"got outliers={self.outliers}, expected heads_apart=True and period=1: each head "
                "of every layer by itself"
            )

    def always(self, layout: Layout, tokens: int) -> int:
        """The most chunks of a prefix that a choice holds beside its budget."""
        steady = layout.steady_chunks(tokens) if self.steady else 0
        return steady + self.outliers_of(layout.num_chunks(tokens))

    def outliers_of(self, chunks: Count) -> Count:
        """Outliers among so many chunks."""
        part = Fraction(self.outliers).limit_denominator(_FINEST)
        return -(-chunks * part.numerator // part.denominator)


NO_ZONES = Zones()
