from __future__ import annotations

import numpy as np

from ckv_jax.prefix.policy import POLICIES

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
