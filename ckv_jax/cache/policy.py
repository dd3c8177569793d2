"""Cache policies: what a page is worth. A higher score stays in memory longer.

A policy sees only a page's own history, so that a score changes only when the page is used or
scored; `Tiers` relies on this to keep its heaps lazily.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]

_RECENCY = 2.0**-32  # below one whole load for any clock a process can reach


class Policy(Protocol):
    """The worth of pages from their history; every array is `[n]`, one entry a page."""

    sees_all: ClassVar[bool]
    """Whether attention counts that a chunk received without being chosen."""

    def score(
        self,
        importance: npt.NDArray[np.float64],
        frequency: npt.NDArray[np.uint32],
        last_used: npt.NDArray[np.uint64],
    ) -> Scores:
        """Finite scores >= 0, float64 `[n]`.

        `importance` is the sum of what was passed to `Tiers.record`, `frequency` the number of
        records, `last_used` the tick of the latest one (0: never used).
        """
        ...


class AttentionGuided:
    """S = I x F (ContiguousKV §4.4, Equation 2).

    I is the attention a chunk has received (the sum of Equation 1's A over the requests that
    used it) and F how often it was loaded. Neither is aged or normalised.
    """

    sees_all: ClassVar[bool] = False

    def score(
        self,
        importance: npt.NDArray[np.float64],
        frequency: npt.NDArray[np.uint32],
        last_used: npt.NDArray[np.uint64],
    ) -> Scores:
        """Equation 2."""
        return importance * frequency


class FrequencyThenAttention:
    """S = F + I / (1 + I): loads count first, attention decides among equals.

    Equation 2's product lets one question's strong attention outweigh several loads, which costs
    hits where every question has chunks of its own: with the reference checkpoint's selections it
    stays below LFU. What attention tells beyond the loads is how near to being chosen a chunk has
    been, so that I sums Equation 1's A over all requests, not only those that chose it.
    """

    sees_all: ClassVar[bool] = True

    def score(
        self,
        importance: npt.NDArray[np.float64],
        frequency: npt.NDArray[np.uint32],
        last_used: npt.NDArray[np.uint64],
    ) -> Scores:
        """The number of loads, and the attention received as a fraction below one load."""
        return frequency + importance / (1.0 + importance)


class Lru:
    """Least recently used: the tick of the latest use."""

    sees_all: ClassVar[bool] = False

    def score(
        self,
        importance: npt.NDArray[np.float64],
        frequency: npt.NDArray[np.uint32],
        last_used: npt.NDArray[np.uint64],
    ) -> Scores:
        """The tick itself, exact up to 2^53."""
        return last_used.astype(np.float64)


class Lfu:
    """Least frequently used; among equals, the least recently used goes first."""

    sees_all: ClassVar[bool] = False

    def score(
        self,
        importance: npt.NDArray[np.float64],
        frequency: npt.NDArray[np.uint32],
        last_used: npt.NDArray[np.uint64],
    ) -> Scores:
        """The number of loads, and recency as a fraction below one load."""
        return frequency + last_used * _RECENCY


class ImportanceRatio:
    """Access frequency x moving average of the share of important tokens (IMPRESS §4.4.2).

    The engine records that share (0 to 1) where `AttentionGuided` records attention. The paper
    gives no window for its average; the average over all accesses needs none and never forgets.
    """

    sees_all: ClassVar[bool] = False

    def score(
        self,
        importance: npt.NDArray[np.float64],
        frequency: npt.NDArray[np.uint32],
        last_used: npt.NDArray[np.uint64],
    ) -> Scores:
        """frequency x (importance / frequency), and 0 for a page that was never used."""
        average = importance / np.maximum(frequency, 1)
        return frequency * average


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        "attention": AttentionGuided,
        "frequency-attention": FrequencyThenAttention,
        "lru": Lru,
        "lfu": Lfu,
        "importance-ratio": ImportanceRatio,
    }
)
