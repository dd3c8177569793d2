"""What `Tiers` promises beside the model of `test_tiers_model.py`, by example."""

from __future__ import annotations

import numpy as np
import pytest

from ckv_jax.prefix.policy import POLICIES
from ckv_jax.prefix.tiers import Tiers

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


def test_what_is_kept_beyond_the_cache_leaves_lowest_first_once_nobody_pins_it() -> None:
    tiers = Tiers(1, 0, 3, ATTENTION)
    tiers.register(3)
    pages = ids(0, 1, 2)
    tiers.record(pages, np.array([0.5, 0.25, 1.0]))
    tiers.own(pages, tiers.take(3))
    tiers.pin(pages)
    tiers.trim()
    assert tiers.device_pages == 3
    tiers.unpin(ids(1, 2))
    tiers.trim()
    assert (tiers.lookup(pages)[0] >= 0).tolist() == [True, False, False]  # two had to go
    tiers.unpin(ids(0))
    tiers.trim()
    assert tiers.device_pages == 1


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


def test_forgotten_pages_leave_and_their_ids_start_anew() -> None:
    tiers = Tiers(2, 2, 2, ATTENTION)
    base = tiers.register(3)
    use(tiers, {base: 9.0, base + 1: 8.0})
    tiers.forget(base, 3)
    assert tiers.device_pages == 0 and tiers.free_slots == 4
    assert tiers.register(3) == base
    assert tiers.scores(base, 3)[1].tolist() == [0, 0, 0]
    assert [slots.tolist() for slots in tiers.lookup(ids(0, 1, 2))] == [[-1] * 3] * 2
    latest = Tiers(2, 2, 2, POLICIES["lru"])
    latest.register(3)
    use(latest, {0: 1.0})
    latest.forget(0, 3)
    assert latest.worth(ids(latest.register(3))).tolist() == [0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.pin(ids(1, 1)), "twice"),
        (lambda t: t.pin(ids(-1)), "got pages -1"),
        (lambda t: t.pin(ids(4)), "expected 0 to 3"),
        (lambda t: t.release(np.array([4], np.int32)), "got slots 4 to 4, expected 0 to 3"),
        (lambda t: t.unpin(ids(0)), "not pinned"),
        (lambda t: t.release(np.array([0], np.int32)), "not lent"),
        (lambda t: t.release(np.array([-1], np.int32)), "got slots -1"),
        (lambda t: t.release(t.take(1)[[0, 0]]), "twice"),
        (lambda t: t.admit(ids(0), np.array([1], np.int32)), "not lent"),
        (lambda t: t.admit(ids(0), np.array([-1], np.int32)), "got slots -1"),
        (lambda t: t.admit(ids(0), t.take(2)), "expected as many"),
        (lambda t: t.admit(ids(0, 1), t.take(1)), "expected as many"),
        (lambda t: t.record(ids(0, 1), np.ones(1)), "attention"),
        (lambda t: t.record(ids(0), np.array([np.nan])), "finite"),
        (lambda t: t.record(ids(0), np.array([-1.0])), "below 0"),
        (lambda t: t.register(0), "expected 1 or more"),
        (lambda t: t.register(2, np.zeros(3), np.zeros(2, np.uint32)), "expected 2"),
        (lambda t: t.register(2, np.zeros(2), np.zeros(3, np.uint32)), "expected 2"),
        (lambda t: t.register(2, np.zeros(2), np.zeros(1, np.uint32)), "expected 2"),
        (lambda t: Tiers(-1, 0, 0, POLICIES["lru"]), "expected 0 or more"),
    ],
)
def test_misuse_is_refused(call, message: str) -> None:
    tiers = Tiers(2, 2, 2, ATTENTION)
    tiers.register(4)
    with pytest.raises(ValueError, match=message):
        call(tiers)
