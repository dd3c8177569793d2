from __future__ import annotations

import numpy as np
import pytest

from ckv_jax.cache import (
    POLICIES,
    AttentionGuided,
    FrequencyThenAttention,
    ImportanceRatio,
    Lfu,
    Lru,
    Policy,
)

IMPORTANCE = np.array([0.0, 1.5, 0.25, 2.0])
FREQUENCY = np.array([0, 2, 4, 2], np.uint32)
LAST_USED = np.array([0, 7, 9, 8], np.uint64)


def scores(policy: Policy) -> list[float]:
    return policy.score(IMPORTANCE, FREQUENCY, LAST_USED).tolist()


def test_attention_guided_is_importance_times_frequency() -> None:
    assert scores(AttentionGuided()) == [0.0, 3.0, 1.0, 4.0]


def test_attention_decides_among_equals_only() -> None:
    assert scores(FrequencyThenAttention()) == pytest.approx([0.0, 2.6, 4.2, 2 + 2 / 3])


def test_lru_orders_by_recency() -> None:
    assert np.argsort(scores(Lru())).tolist() == [0, 1, 3, 2]


def test_lfu_orders_by_frequency_then_recency() -> None:
    assert np.argsort(scores(Lfu())).tolist() == [0, 1, 3, 2]
    assert scores(Lfu())[1] < scores(Lfu())[3] < 3.0


def test_importance_ratio_prefers_the_papers_second_chunk() -> None:
    # IMPRESS, Figure 14: 15 uses at one important key of two against 10 uses at two of two
    first, second = ImportanceRatio().score(
        np.array([15 * 0.5, 10 * 1.0]),
        np.array([15, 10], np.uint32),
        np.array([25, 24], np.uint64),
    )
    assert (first, second) == (7.5, 10.0)
    assert scores(ImportanceRatio())[0] == 0.0


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_dtype_and_shape(name: str) -> None:
    out = POLICIES[name]().score(IMPORTANCE, FREQUENCY, LAST_USED)
    assert out.dtype == np.float64 and out.shape == (4,)
