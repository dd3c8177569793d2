"""Cache policies' formulas; `Tiers` against a plain model, over random histories."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckv_jax.prefix.policy import POLICIES, Policy
from ckv_jax.prefix.tiers import PoolExhausted, Tiers

WORK = 8


def novelty(importance: np.ndarray, frequency: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Scores that fall with use, unlike those of the package."""
    return (1.0 + importance) / (1.0 + frequency)


def boredom(importance: np.ndarray, frequency: np.ndarray, _: np.ndarray) -> np.ndarray:
    """Scores that fall with attention."""
    return (1.0 + frequency) / (1.0 + importance)


ALL = {
    **POLICIES,
    "novelty": Policy(novelty, sees_all=True),
    "boredom": Policy(boredom, sees_all=True),
}


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


def test_ids_of_forgotten_pages_serve_ranges_of_other_sizes() -> None:
    tiers = Tiers(2, 2, WORK, POLICIES["lru"])
    bases = [tiers.register(size) for size in (4, 6, 5)]
    assert bases == [0, 4, 10]
    tiers.forget(0, 4)
    tiers.forget(4, 6)
    assert [tiers.register(size) for size in (7, 3, 1)] == [0, 7, 15]


def test_attention_that_is_not_finite_is_refused_and_changes_nothing() -> None:
    tiers = Tiers(2, 2, WORK, POLICIES["attention"])
    pages = np.arange(tiers.register(2), 2)
    tiers.record(pages, np.array([0.5, 1.0]))
    for add in (tiers.record, tiers.observe):
        with pytest.raises(ValueError, match="not finite"):
            add(pages, np.array([0.5, np.nan]))
        assert [part.tolist() for part in tiers.history(pages)] == [[0.5, 1.0], [1, 1]]
    tiers.record(pages, np.array([0.5, 0.5]))
    assert tiers.worth(pages).tolist() == [2.0, 3.0]


@dataclass
class TierModel:
    """What `Tiers` must do, said as plainly as possible: dictionaries and full sorts."""

    device_slots: int
    host_slots: int
    policy: Policy
    clock: int = 0
    importance: dict[int, float] = field(default_factory=dict)
    frequency: dict[int, int] = field(default_factory=dict)
    last_used: dict[int, int] = field(default_factory=dict)
    device: dict[int, int] = field(default_factory=dict)
    host: set[int] = field(default_factory=set)
    pins: dict[int, int] = field(default_factory=dict)

    def score(self, page: int) -> float:
        return float(
            self.policy.score(
                np.array([self.importance[page]]),
                np.array([self.frequency[page]], np.uint32),
                np.array([self.last_used[page]], np.uint64),
            )[0]
        )

    def rank(self, page: int) -> tuple[float, int]:
        """Sorts the worst first: the lowest score, then the highest page."""
        return self.score(page), -page

    def record(self, pages: list[int], attention: list[float]) -> None:
        self.clock += 1
        for page, mass in zip(pages, attention, strict=True):
            newest = self.policy.newest
            if newest is None:
                self.importance[page] += mass
            elif self.frequency[page] == 0:
                self.importance[page] = mass
            else:
                self.importance[page] += newest * (mass - self.importance[page])
            self.frequency[page] += 1
            self.last_used[page] = self.clock

    def observe(self, pages: list[int], attention: list[float]) -> None:
        for page, mass in zip(pages, attention, strict=True):
            self.importance[page] += mass

    def admit(self, slots: dict[int, int]) -> None:
        """`slots`: page -> device slot it sits in."""
        pushed = []
        contenders = [
            page
            for page in slots
            if page not in self.device and not (page in self.host and self.pins.get(page))
        ]
        losers = []
        for page in sorted(contenders, key=self.rank, reverse=True):
            if len(self.device) >= self.device_slots:
                victim = self.victim(set(self.device))
                if victim is None or self.score(page) <= self.score(victim):
                    losers.append(page)
                    continue
                del self.device[victim]
                pushed.append(victim)
            self.device[page] = slots[page]
            self.host.discard(page)
        rivals = pushed + [page for page in losers if page not in self.host]
        for page in sorted(rivals, key=self.rank, reverse=True):
            if len(self.host) >= self.host_slots:
                victim = self.victim(self.host)
                if victim is None or self.score(page) <= self.score(victim):
                    continue
                self.host.remove(victim)
            self.host.add(page)

    def victim(self, pages: set[int]) -> int | None:
        return min((p for p in pages if not self.pins.get(p)), key=self.rank, default=None)


class TiersAgainstModel(RuleBasedStateMachine):
    """Requests that overlap: each pins, takes work slots, then ends by `admit` or `release`."""

    @initialize(
        policy=st.sampled_from(sorted(ALL)), device=st.integers(0, 6), host=st.integers(0, 8)
    )
    def start(self, policy: str, device: int, host: int) -> None:
        self.tiers = Tiers(device, host, WORK, ALL[policy])
        self.model = TierModel(device, host, ALL[policy])
        self.ranges: list[tuple[int, int]] = []
        self.requests: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.held: dict[int, bytes] = {}  # device slot -> page written there, as the engine would
        self.host_held: dict[int, int] = {}
        self.register(n=12)

    @rule(n=st.integers(1, 6))
    @precondition(lambda self: len(self.ranges) < 4)
    def register(self, n: int) -> None:
        base = self.tiers.register(n)
        self.ranges.append((base, n))
        for page in range(base, base + n):
            self.model.importance[page] = 0.0
            self.model.frequency[page] = self.model.last_used[page] = 0

    @rule(data=st.data())
    @precondition(lambda self: len(self.requests) < 3)
    def begin(self, data: st.DataObject) -> None:
        known = sorted(self.model.importance)
        chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=7, unique=True))
        pages = np.array(chosen, np.int64)
        device, host = self.tiers.lookup(pages)
        assert device.dtype == host.dtype == np.int32
        missing = device < 0
        if missing.sum() > self.tiers.device.free:
            with pytest.raises(PoolExhausted):
                self.tiers.take(int(missing.sum()))
            return
        slots = device.copy()
        slots[missing] = self.tiers.take(int(missing.sum()))
        self.held.update(zip(slots.tolist(), chosen, strict=True))  # the packs are copied there
        cached = pages[(device >= 0) | (host >= 0)]
        self.tiers.pin(cached)
        for page in cached.tolist():
            self.model.pins[page] = self.model.pins.get(page, 0) + 1
        self.requests.append((pages, slots, cached))

    @rule(
        index=st.integers(0, 2),
        masses=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=7, max_size=7),
        failed=st.booleans(),
    )
    @precondition(lambda self: self.requests)
    def end(self, index: int, masses: list[float], failed: bool) -> None:
        pages, slots, cached = self.requests.pop(index % len(self.requests))
        self.tiers.unpin(cached)
        for page in cached.tolist():
            self.model.pins[page] -= 1
        if failed:
            lent = ~np.isin(pages, cached) | (self.tiers.lookup(pages)[0] != slots)
            self.tiers.release(slots[lent])
            return
        attention = masses[: len(pages)]
        self.tiers.record(pages, np.array(attention))
        self.model.record(pages.tolist(), attention)
        demotions = self.tiers.admit(pages, slots)
        self.model.admit(dict(zip(pages.tolist(), slots.tolist(), strict=True)))

        for source, target in demotions.tolist():
            self.host_held[target] = self.held[source]

    @rule(data=st.data(), mass=st.sampled_from([0.25, 1.0, 4.0]))
    def observe(self, data: st.DataObject, mass: float) -> None:
        known = sorted(self.model.importance)
        pages = data.draw(st.lists(st.sampled_from(known), max_size=5, unique=True))
        self.tiers.observe(np.array(pages, np.int64), np.full(len(pages), mass))
        self.model.observe(pages, [mass] * len(pages))

    @rule(index=st.integers(0, 3))
    @precondition(lambda self: len(self.ranges) > 1)
    def forget(self, index: int) -> None:
        base, n = self.ranges[index % len(self.ranges)]
        ours = range(base, base + n)
        running = {page for pages, _, _ in self.requests for page in pages.tolist()}
        if any(self.model.pins.get(page) for page in ours):
            with pytest.raises(ValueError, match="pinned"):
                self.tiers.forget(base, n)
        elif running.isdisjoint(ours):
            self.tiers.forget(base, n)
            self.ranges.remove((base, n))
            for page in ours:
                del self.model.importance[page]
                self.model.device.pop(page, None)
                self.model.host.discard(page)

    @invariant()
    def same_contents(self) -> None:
        known = np.array(sorted(self.model.importance), np.int64)
        device, host = self.tiers.lookup(known)
        assert min(device.min(), host.min()) >= -1
        on_device = {p: s for p, s in zip(known.tolist(), device.tolist(), strict=True) if s >= 0}
        on_host = {p: s for p, s in zip(known.tolist(), host.tolist(), strict=True) if s >= 0}
        assert on_device == self.model.device
        assert set(on_host) == self.model.host
        assert not set(on_device) & set(on_host), "tiers are exclusive"
        assert len(on_device) == self.tiers.device_pages <= self.tiers.device_slots
        assert len(on_host) == self.tiers.host_pages <= self.tiers.host_slots
        for page, slot in on_device.items():
            assert self.held[slot] == page, "nobody wrote over a cached pack"
        for page, slot in on_host.items():
            assert self.host_held[slot] == page

    @invariant()
    def slots_are_conserved(self) -> None:
        lent = sum(
            int((self.tiers.lookup(pages)[0] != slots).sum()) for pages, slots, _ in self.requests
        )
        total = self.tiers.device_slots + WORK
        assert self.tiers.device.free + self.tiers.device_pages + lent == total

    @invariant()
    def scores_are_kept(self) -> None:
        for base, n in self.ranges:
            importance, frequency = self.tiers.history(np.arange(base, base + n))
            assert importance.tolist() == [self.model.importance[p] for p in range(base, base + n)]
            assert frequency.tolist() == [self.model.frequency[p] for p in range(base, base + n)]


TestTiersAgainstModel = TiersAgainstModel.TestCase
TestTiersAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
