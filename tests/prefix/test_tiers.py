"""Cache policies' formulas, and what `Tiers` promises beside `test_tiers_model.py`, by example."""

from __future__ import annotations

import numpy as np
import pytest

from ckv_jax.prefix.policy import POLICIES
from ckv_jax.prefix.tiers import Tiers

IMPORTANCE = np.array([0.0, 1.5, 0.25, 2.0])
FREQUENCY = np.array([0, 2, 4, 2], np.uint32)
LAST_USED = np.array([0, 7, 9, 8], np.uint64)


def scores(name: str) -> list[float]:
    return POLICIES[name].score(IMPORTANCE, FREQUENCY, LAST_USED).tolist()


def test_attention_guided_is_importance_times_frequency() -> None:
    assert scores("attention") == [0.0, 3.0, 1.0, 4.0]


def test_lru_orders_by_recency() -> None:
    assert np.argsort(scores("lru")).tolist() == [0, 1, 3, 2]


def test_lfu_orders_by_frequency_then_recency() -> None:
    found = scores("lfu")
    assert np.argsort(found).tolist() == [0, 1, 3, 2]
    assert found[1] < found[3] < 3.0


ATTENTION = POLICIES["attention"]


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int64)


def use(tiers: Tiers, attention: dict[int, float]) -> np.ndarray:
    """One request over these pages, from lookup to admit; returns the slots it used."""
    pages = ids(*attention)
    device, host = tiers.lookup(pages)
    cached = pages[(device >= 0) | (host >= 0)]
    tiers.pin(cached)
    slots = device.copy()
    slots[device < 0] = tiers.take(int((device < 0).sum()))
    tiers.record(pages, np.array(list(attention.values())))
    tiers.unpin(cached)
    tiers.admit(pages, slots)
    return slots


def test_attention_without_a_use_decides_among_equal_frequencies() -> None:
    tiers = Tiers(1, 0, 1, POLICIES["frequency-attention"])
    assert tiers.observes and not Tiers(1, 0, 1, ATTENTION).observes
    tiers.register(4)
    tiers.observe(ids(1), np.array([3.0]))
    use(tiers, {0: 0.5})
    use(tiers, {1: 0.25})  # used as often, but scored higher before
    assert (tiers.lookup(ids(0, 1))[0] >= 0).tolist() == [False, True]
    tiers.observe(ids(0, 1), np.array([9.0, 0.0]))
    use(tiers, {2: 5.0})  # above page 1, which is still the one in memory
    assert (tiers.lookup(ids(0, 1, 2))[0] >= 0).tolist() == [False, False, True]
    tiers.observe(ids(2), np.array([9.0]))
    use(tiers, {3: 6.0})
    assert tiers.lookup(ids(2))[0][0] >= 0  # its score rose while it was in memory
    use(tiers, {0: 0.0})
    assert tiers.lookup(ids(0))[0][0] >= 0  # two uses are more than any attention
    assert tiers.scores(0, 4)[1].tolist() == [2, 1, 1, 1]
    with pytest.raises(ValueError, match="twice"):
        tiers.observe(ids(1, 1), np.ones(2))


def test_a_restart_goes_on_with_persisted_scores() -> None:
    tiers = Tiers(1, 1, 1, ATTENTION)
    base = tiers.register(4)
    use(tiers, {1: 0.5})
    use(tiers, {1: 0.25})
    importance, frequency = tiers.scores(base, 4)
    again = Tiers(1, 1, 1, ATTENTION)
    base = again.register(4, importance.reshape(2, 2), frequency.reshape(2, 2))
    assert again.scores(base, 4)[0].tolist() == [0.0, 0.75, 0.0, 0.0]
    use(again, {2: 0.7})
    use(again, {1: 0.0})  # 0.75 x 3 beats 0.7 x 1
    assert again.lookup(ids(1))[0][0] >= 0
