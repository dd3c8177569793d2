"""Cache policies, which score pages.

A higher score stays in memory longer. A policy sees only a page's own history, so that a score
changes only when the page is used or scored; `tiers.Tier` relies on this to be lazy. To add one: a
function, and its line in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

# [n], what was passed to `Tiers.record`: its sum, or its moving average (`Policy.newest`)
Importance = npt.NDArray[np.float64]
Frequency = npt.NDArray[np.uint32]  # [n], the number of records
LastUsed = npt.NDArray[np.uint64]  # [n], the tick of the latest record, 0 for never
Scores = npt.NDArray[np.float64]  # [n], finite and >= 0

Score = Callable[[Importance, Frequency, LastUsed], Scores]

_RECENCY = 2.0**-32  # below one whole load for any clock a process can reach


def attention_guided(importance: Importance, frequency: Frequency, _: LastUsed) -> Scores:
    """S = I x F (ContiguousKV §4.4, Equation 2).

    I is the attention a chunk has received (the sum of Equation 1's A over the requests that
    used it) and F how often it was loaded. Neither is aged or normalised.
    """
    return importance * frequency


def frequency_then_attention(importance: Importance, frequency: Frequency, _: LastUsed) -> Scores:
    """S = F + I / (1 + I): loads count first, attention decides among equals.

    Equation 2's product lets one question's strong attention outweigh several loads, which costs
    hits where every question has chunks of its own: with the reference checkpoint's selections it
    stays below LFU. What attention adds to the loads is how near to being selected a chunk has
    been, so that I sums Equation 1's A over all requests, not only those that selected it.
    """
    return frequency + importance / (1.0 + importance)


def lru(importance: Importance, frequency: Frequency, last_used: LastUsed) -> Scores:
    """Least recently used: the tick of the latest use, exact up to 2^53."""
    return last_used.astype(np.float64)


def lfu(importance: Importance, frequency: Frequency, last_used: LastUsed) -> Scores:
    """Least frequently used; among equals, the least recently used goes first."""
    return frequency + last_used * _RECENCY


@dataclass(frozen=True, slots=True)
class Policy:
    """A cache policy: a score function, and the records that it scores."""

    score: Score
    """Maps importance, frequency and last use of pages to scores; higher ones stay longer."""
    sees_all: bool = False
    """Whether a chunk's attention is recorded when the chunk was not selected, too."""
    newest: float | None = None
    """Weight of the latest record in a moving average, which replaces the sum."""

    def __post_init__(self) -> None:
        if self.newest is not None and (self.sees_all or not 0 < self.newest <= 1):
            raise ValueError(
                f"got newest={self.newest} with sees_all={self.sees_all}, expected a weight in "
                "(0, 1] with sees_all=False"
            )


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "attention": Policy(attention_guided),
        "frequency-attention": Policy(frequency_then_attention, sees_all=True),
        "lru": Policy(lru),
        "lfu": Policy(lfu),
    }
)
