from __future__ import annotations

import numpy as np
import pytest

from ckv_jax.prefix.policy import POLICIES, Policy
from ckv_jax.prefix.tiers import Tiers

IMPORTANCE = np.array([0.0, 1.5, 0.25, 2.0])
FREQUENCY = np.array([0, 2, 4, 2], np.uint32)
LAST_USED = np.array([0, 7, 9, 8], np.uint64)


def scores(name: str) -> list[float]:
    return POLICIES[name].score(IMPORTANCE, FREQUENCY, LAST_USED).tolist()


def test_attention_guided_is_importance_times_frequency() -> None:
    assert scores("attention") == [0.0, 3.0, 1.0, 4.0]


def test_attention_decides_among_equals_only() -> None:
    assert scores("frequency-attention") == pytest.approx([0.0, 2.6, 4.2, 2 + 2 / 3])


def test_lru_orders_by_recency() -> None:
    assert np.argsort(scores("lru")).tolist() == [0, 1, 3, 2]


def test_lfu_orders_by_frequency_then_recency() -> None:
    found = scores("lfu")
    assert np.argsort(found).tolist() == [0, 1, 3, 2]
    assert found[1] < found[3] < 3.0


def test_an_average_begins_with_its_first_value_and_follows_what_changes() -> None:
    tiers = Tiers(1, 0, 2, Policy(POLICIES["attention"].score, newest=0.25))
    base = tiers.register(2)
    tiers.record(np.array([base]), np.array([0.8]))
    assert tiers.scores(base, 1)[0].tolist() == pytest.approx([0.8])
    for _ in range(10):
        tiers.record(np.array([base]), np.array([0.0]))
    assert tiers.scores(base, 1)[0][0] < 0.1


@pytest.mark.parametrize("newest", [0.0, 1.5])
def test_a_weight_is_a_share(newest: float) -> None:
    with pytest.raises(ValueError, match="newest"):
        Policy(POLICIES["lru"].score, newest=newest)
    with pytest.raises(ValueError, match="sees_all=True"):
        Policy(POLICIES["lru"].score, sees_all=True, newest=0.5)
    assert Policy(POLICIES["lru"].score, newest=1).newest == 1


def test_a_policy_is_one_function() -> None:
    def fresh(importance: np.ndarray, frequency: np.ndarray, last_used: np.ndarray) -> np.ndarray:
        return 1.0 / (1.0 + frequency)

    tiers = Tiers(1, 0, 2, Policy(fresh))
    tiers.register(2)
    for page, used in ((0, 1), (1, 2)):
        pages = np.array([page])
        slots = tiers.take(1)
        for _ in range(used):
            tiers.record(pages, np.array([0.5]))
        tiers.admit(pages, slots)
    slots, _ = tiers.lookup(np.array([0, 1]))
    assert (slots >= 0).tolist() == [True, False]  # used less, worth more
