"""What `Tiers` promises beside the model of `test_tiers_model.py`, by example."""

from __future__ import annotations

import numpy as np
import pytest

from ckv_jax.prefix.policy import POLICIES, Policy
from ckv_jax.prefix.tiers import Tiers, counted

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


def test_pins_of_several_at_once_nest() -> None:
    tiers = Tiers(1, 1, 2, ATTENTION)
    tiers.register(8)
    use(tiers, {0: 0.5})
    tiers.pin(*counted(ids(0, 0)))
    tiers.unpin(ids(0))
    assert not tiers.let_go(ids(0)) and tiers.pinned_slots == 1
    with pytest.raises(ValueError, match="got page 0 to unpin"):
        tiers.unpin(*counted(ids(0, 0)))
    tiers.unpin(ids(0))
    assert tiers.pinned_slots == 0


def test_pages_that_make_room_and_find_some_in_the_host_are_not_dropped() -> None:
    tiers = Tiers(3, 2, 1, ATTENTION)
    tiers.register(4)
    for page, attention in enumerate((0.5, 0.25, 0.125)):
        use(tiers, {page: attention})
    moves = tiers.make_room(4)
    assert moves.demote_pages.tolist() == [0, 1] and moves.dropped.tolist() == [2]
    assert sorted(tiers.lookup(ids(0, 1))[1].tolist()) == [0, 1]
    assert tiers.stats.demotions == 2 and tiers.stats.dropped == 1


def test_room_is_made_of_the_lowest_that_nobody_pins_and_of_no_more_than_it_takes() -> None:
    tiers = Tiers(4, 0, 0, ATTENTION)
    tiers.register(4)
    use(tiers, {0: 0.125, 1: 0.25, 2: 0.5, 3: 1.0})
    tiers.pin(ids(0))
    for wanted, left, free in ((1, [0, 2, 3], 1), (2, [0, 3], 2), (4, [0], 3)):
        tiers.make_room(wanted)
        there = np.flatnonzero(tiers.lookup(ids(0, 1, 2, 3))[0] >= 0)
        assert (there.tolist(), tiers.free_slots) == (left, free)


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


def test_pages_get_the_slots_they_are_to_own_unless_they_have_some() -> None:
    tiers = Tiers(1, 1, 2, ATTENTION)
    tiers.register(4)
    use(tiers, {0: 0.5})
    use(tiers, {1: 0.25})
    assert tiers.lookup(ids(1))[1].tolist() == [0]
    had, slots = tiers.lookup(ids(0))[0], tiers.take(2)
    tiers.own(ids(0, 1), slots)  # one is cached, one in the host tier
    device, host = tiers.lookup(ids(0, 1))
    assert device.tolist() == [had[0], slots[1]] and host.tolist() == [-1, -1]
    assert tiers.free_slots == 1 and tiers.take(1).tolist() == [slots[0]]


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


def test_hits_are_counted_by_tier() -> None:
    tiers = Tiers(1, 1, 2, ATTENTION)
    tiers.register(4)
    use(tiers, {0: 2.0, 1: 1.0})
    use(tiers, {0: 2.0, 1: 0.0, 2: 0.0})
    stats = tiers.stats
    assert (stats.device_hits, stats.host_hits, stats.misses) == (1, 1, 3)
    assert stats.demotions == 1 and stats.dropped == 0


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


def test_pages_kept_beyond_the_cache_leave_no_room_for_others() -> None:
    tiers = Tiers(1, 0, 4, ATTENTION)
    tiers.register(5)
    tiers.own(ids(0, 1, 2), tiers.take(3))
    tiers.pin(ids(0, 1, 2))
    slots = tiers.take(2)
    tiers.record(ids(3, 4), np.array([9.0, 8.0]))
    moves = tiers.admit(ids(3, 4), slots)
    assert not moves.kept.any() and tiers.device_pages == 3


def test_where_there_is_room_nobody_leaves() -> None:
    tiers = Tiers(3, 0, 1, ATTENTION)
    tiers.register(2)
    use(tiers, {0: 0.5, 1: 0.25})
    for wanted in (1, 2):
        assert not len(tiers.make_room(wanted).freed)
    assert not len(tiers.trim().freed) and tiers.device_pages == 2


def test_a_page_whose_score_has_fallen_is_the_first_to_leave_the_host() -> None:
    latest = Policy(lambda importance, *_: importance, newest=1)
    tiers = Tiers(0, 2, 2, latest)
    tiers.register(4)
    use(tiers, {0: 5.0, 1: 3.0})
    use(tiers, {2: 1.0})  # worth less than both
    assert tiers.lookup(ids(0, 1, 2))[1].tolist() == [0, 1, -1]
    use(tiers, {0: 0.5})
    use(tiers, {3: 2.0})
    assert tiers.lookup(ids(0, 1, 3))[1].tolist() == [-1, 1, 0]


def test_worth_is_the_policys_and_no_score_is_below_zero() -> None:
    tiers = Tiers(1, 0, 1, ATTENTION)
    tiers.register(2)
    tiers.record(ids(0), np.array([0.5]))
    tiers.record(ids(0), np.array([0.25]))
    assert tiers.worth(ids(0, 1)).tolist() == [1.5, 0.0]
    odd = Tiers(1, 0, 1, Policy(lambda importance, *_: np.where(importance > 0, 1.0, -0.0)))
    odd.register(2)
    use(odd, {0: 0.0})  # -0.0: the sign would make it the highest of all
    use(odd, {1: 0.5})
    assert (odd.lookup(ids(0, 1))[0] >= 0).tolist() == [False, True]


def test_what_is_let_go_leaves_both_tiers() -> None:
    tiers = Tiers(1, 1, 1, ATTENTION)
    tiers.register(4)
    use(tiers, {0: 0.5})
    use(tiers, {1: 0.25})
    assert (tiers.device_pages, tiers.host_pages) == (1, 1)
    assert tiers.let_go(ids(0, 1, 2)) == 2
    assert (tiers.device_pages, tiers.host_pages, tiers.free_slots) == (0, 0, 2)
    assert [slots.tolist() for slots in tiers.lookup(ids(0, 1))] == [[-1, -1]] * 2


def test_the_very_first_use_is_later_than_none() -> None:
    tiers = Tiers(1, 0, 2, POLICIES["lru"])
    tiers.register(2)
    tiers.record(ids(0), np.ones(1))
    slots = tiers.take(2)
    assert tiers.admit(ids(0, 1), slots).kept.tolist() == [True, False]  # 1 was never used
    assert tiers.worth(ids(0)) > tiers.worth(ids(1))


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
