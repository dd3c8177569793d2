"""How much of several stored texts is computed again where they are put together, and what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ckv_jax.validate import check_number

Again = Literal["both", "attended", "first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """What `Request.parts` are computed again for."""

    recompute: float = 0.2
    """Tokens computed again at most, in [0, 1], as a share of those that a layer attends to: whole
    chunks, at least one, of the parts after the first, whose own keys and values are exact. 0:
    none; 1, with a budget of 1: the answer of a dense prefill."""
    choice: Again = "both"
    """Which: "attended", the chunks that the question attends to most, averaged over all layers
    (ProphetKV, stage 1); "first", the first chunks of each part (EPIC, the baseline); or "both",
    the first chunk of each part, where texts meet, and then those that are attended to most."""

    def __post_init__(self) -> None:
        check_number("recompute", self.recompute)
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"got recompute={self.recompute}, expected a share in [0, 1]")
        if self.choice not in get_args(Again):
            raise ValueError(
                f"got choice={self.choice!r}, expected one of {', '.join(get_args(Again))}"
            )
