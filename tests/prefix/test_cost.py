"""A request's bookkeeping is about its own pages, however many the caches hold."""

from __future__ import annotations

import tracemalloc

import numpy as np

from ckv_jax.prefix.policy import POLICIES
from ckv_jax.prefix.tiers import Tiers


def test_a_request_over_600_of_100_000_pages_makes_no_array_as_long_as_the_table() -> None:
    """Victims' order is made anew now and then, over everything that is cached; never by each
    request, whose time would then grow with the caches (0.3 ms beside first tokens of 64 ms)."""
    count, used = 100_000, 600
    rng = np.random.default_rng(0)
    tiers = Tiers(15_000, 36_000, used, POLICIES["attention"])
    tiers.register(count)
    weight = 1 / np.arange(1, count + 1) ** 0.7
    edges, order = np.cumsum(weight) / weight.sum(), rng.permutation(count)
    peaks = []
    for _ in range(300):
        drawn = np.unique(np.searchsorted(edges, rng.random(2 * used)))
        pages = order[rng.permutation(drawn)[:used]]
        attention = rng.random(used)
        tracemalloc.start()
        device, host = tiers.lookup(pages)
        cached = pages[(device >= 0) | (host >= 0)]
        tiers.pin(cached)
        missing = device < 0
        device[missing] = tiers.take(int(missing.sum()))
        tiers.record(pages, attention)
        tiers.unpin(cached)
        tiers.admit(pages, device)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert tiers.device_pages == 15_000 and tiers.host_pages == 36_000, "both tiers are full"
    # A byte a page would be an array over all of them; nine requests in ten need less than that.
    assert np.percentile(peaks[150:], 90) < count
