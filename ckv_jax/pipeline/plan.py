"""Plan of the layers: periods share a selection, subperiods share a jitted call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckv_jax.config import SystemConfig, scoring_layers


@dataclass(frozen=True, slots=True)
class Step:
    """One subperiod: the layers of one jitted call and the packs that hold their KV."""

    index: int
    layers: range
    groups: range
    """Layer groups (packs) of these layers, those of each of the period's selections in turn."""
    period: int
    selects: bool
    """Whether a selection is made before this step, at its first layer."""


class Period(NamedTuple):
    """The layers that share a selection, or `Plan.selections_per_period` of them."""

    steps: tuple[Step, ...]
    groups: np.ndarray
    """int [J, G]: the layer groups of each of J selections."""
    scoring: list[int]
    """The layers whose queries select, see `Select.score_layers`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A model's layers in order; the last period, subperiod and pack may be shorter."""

    steps: tuple[Step, ...]
    by_period: tuple[Period, ...]
    selections_per_period: int
    """J: selection j of a period is number `period * J + j` of the plan."""
    group_table: np.ndarray
    """The layer groups int [selections, G] that each selection is made for, -1 past their end."""

    @classmethod
    def of(cls, num_layers: int, system: SystemConfig, *, selections_per_period: int = 1) -> Plan:
        """The plan of `num_layers` layers: period p, subperiod sp and pack of `system`.

        `selections_per_period`: each is for its own KV heads.
        """
        count = selections_per_period
        for select in (system.reprefill, system.decode):
            if count > 1 and select and (select.coarse or select.score or select.peaks):
                raise ValueError(
                    f"got {count} selections per period with a coarse pass, peaks or a score, "
                    "expected none of them: they need all heads together"
                )
        pack = system.pack_layers
        steps = tuple(
            Step(
                index=index,
                layers=range(first, min(first + system.subperiod, num_layers)),
                groups=range(
                    first // pack * count,
                    -(-min(first + system.subperiod, num_layers) // pack) * count,
                ),
                period=first // system.period,
                selects=first % system.period == 0,
            )
            for index, first in enumerate(range(0, num_layers, system.subperiod))
        )
        periods = []
        for index in range(-(-num_layers // system.period)):
            mine = tuple(step for step in steps if step.period == index)
            every = range(mine[0].groups.start, mine[-1].groups.stop)
            layers = range(mine[0].layers.start, mine[-1].layers.stop)
            scoring = scoring_layers(layers, system.reprefill.score_layers)
            periods.append(Period(mine, np.array(every).reshape(-1, count).T, scoring))
        table = np.full((len(periods) * count, periods[0].groups.shape[1]), -1)
        for index, period in enumerate(periods):
            table[index * count : (index + 1) * count, : period.groups.shape[1]] = period.groups
        return cls(steps, tuple(periods), count, table)

    @property
    def periods(self) -> int:
        """Number of periods of a request."""
        return len(self.by_period)

    def scoring_layers(self, period: int, most: int) -> list[int]:
        """As `Period.scoring`, at most so many."""
        steps = self.by_period[period].steps
        layers = range(steps[0].layers.start, steps[-1].layers.stop)
        return scoring_layers(layers, most)

    @property
    def selections(self) -> int:
        """Of all periods."""
        return self.periods * self.selections_per_period

    def selections_of(self, period: int) -> range:
        """The selections that a period makes."""
        return range(period * self.selections_per_period, (period + 1) * self.selections_per_period)

    def selection_of(self, step: Step, group: int) -> int:
        """The selection that decides what is attended to of one of a step's layer groups."""
        return step.period * self.selections_per_period + group % self.selections_per_period

    def groups(self, selection: int) -> range:
        """The layer groups that a selection is made for, in layer order."""
        period, index = divmod(selection, self.selections_per_period)
        groups = self.by_period[period].groups[index]
        return range(int(groups[0]), int(groups[-1]) + 1, self.selections_per_period)
