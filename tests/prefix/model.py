"""What `Tiers` must do, said as plainly as possible: dictionaries and full sorts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ckv_jax.prefix.policy import Policy


@dataclass
class TierModel:
    """Contents of both tiers as page -> slot, and the score columns as dictionaries."""

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
