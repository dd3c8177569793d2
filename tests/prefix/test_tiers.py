"""Cache policies' formulas; `test_tiers_model.py` has what `Tiers` makes of them."""

from __future__ import annotations

import numpy as np

from ckv_jax.prefix.policy import POLICIES


def test_policies_score_by_importance_frequency_and_recency() -> None:
    importance = np.array([0.0, 1.5, 0.25, 2.0])
    frequency = np.array([0, 2, 4, 2], np.uint32)
    last_used = np.array([0, 7, 9, 8], np.uint64)
    found = {
        name: POLICIES[name].score(importance, frequency, last_used)
        for name in ("attention", "frequency-attention", "lru", "lfu")
    }
    assert found["attention"].tolist() == [0.0, 3.0, 1.0, 4.0]
    np.testing.assert_allclose(found["frequency-attention"], [0.0, 2.6, 4.2, 2 + 2 / 3])
    assert np.argsort(found["lru"]).tolist() == [0, 1, 3, 2]
    assert np.argsort(found["lfu"]).tolist() == [0, 1, 3, 2]
    assert found["lfu"][1] < found["lfu"][3] < 3.0  # recency decides within a frequency alone
