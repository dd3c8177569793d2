"""What the tiers decided, for whoever moves the bytes, and counts of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckv_jax.cache.heap import Pages
from ckv_jax.cache.slots import SlotArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What `Tiers.admit` decided. The bookkeeping is done already; the copies are the caller's.

    Attributes:
        demote: int32 `[d, 2]`, (device slot, host slot): the pack in that device slot now belongs
            in that host slot. It is either a page pushed off the device or a fresh one that is
            worth the host but not the device. Copy before any of these device slots is written
            again, that is before the next `take`. (A fresh page's bytes may as well be copied
            from the buffer it was read into.)
        demote_pages: int64 `[d]`, the pages of `demote`.
        kept: bool `[n]`, aligned with the pages given: the page is now cached in the device slot
            it was given in (nothing to copy: a work slot becomes a cache slot by relabelling).
        freed: int32, device slots that went back to the free ones.
        dropped: int64, pages that were in memory and are no more; their scores stay.
    """

    demote: npt.NDArray[np.int32]
    demote_pages: Pages
    kept: npt.NDArray[np.bool_]
    freed: SlotArray
    dropped: Pages


@dataclass(slots=True, kw_only=True)
class TierStats:
    """Counters since the start; a hit is counted when a page is recorded."""

    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    promotions: int = 0
    demotions: int = 0
    dropped: int = 0
