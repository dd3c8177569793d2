"""Which layers run together: periods that share a selection, subperiods that share a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from ckv_jax.config import SystemConfig, scoring_layers


@dataclass(frozen=True, slots=True)
class Step:
    """One subperiod: the layers of one jitted call and the packs that hold their KV."""

    index: int
    layers: range
    groups: range
    """Layer groups (packs) of these layers; with heads apart, those of each head in turn."""
    period: int
    selects: bool
    """Whether a selection is made before this step, at its first layer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A model's layers in order; the last period, subperiod and pack may be shorter."""

    steps: tuple[Step, ...]
    periods: int
    parts: int
    """Choices that a period makes: one, or one for each KV head. Choice `period * parts + head`."""
    score_layers: int
    """How many layers of a period a question asks, at most."""

    @classmethod
    def of(cls, num_layers: int, system: SystemConfig, *, kv_heads: int = 0) -> Plan:
        """The plan of `num_layers` layers: period p, subperiod sp and pack of `system`.

        `kv_heads`: of each layer, for a system whose heads are apart.
        """
        if num_layers < 1:
            raise ValueError(f"got num_layers={num_layers}, expected at least 1")
        if system.heads_apart and kv_heads < 1:
            raise ValueError(f"got kv_heads={kv_heads} with heads apart, expected at least 1")
        pack, parts = system.pack_layers, kv_heads if system.heads_apart else 1
        steps = tuple(
            Step(
                index=index,
                layers=range(first, min(first + system.subperiod, num_layers)),
                groups=range(
                    first // pack * parts,
                    -(-min(first + system.subperiod, num_layers) // pack) * parts,
                ),
                period=first // system.period,
                selects=first % system.period == 0,
            )
            for index, first in enumerate(range(0, num_layers, system.subperiod))
        )
        return cls(
            steps=steps,
            periods=-(-num_layers // system.period),
            parts=parts,
            score_layers=system.choose.score_layers,
        )

    def period_steps(self, period: int) -> tuple[Step, ...]:
        """The subperiods of one period, in order; empty past the last."""
        return tuple(step for step in self.steps if step.period == period)

    def first_layer(self, period: int) -> int:
        """The layer whose queries select for this period, or guess what it will select."""
        return self.period_steps(period)[0].layers[0]

    def scoring_layers(self, period: int, most: int | None = None) -> list[int]:
        """The layers whose queries select for this period, see `Select.score_layers`: so many at
        most (None: as many as a question asks)."""
        steps = self.period_steps(period)
        layers = range(steps[0].layers[0], steps[-1].layers[-1] + 1)
        return scoring_layers(layers, self.score_layers if most is None else most)

    @property
    def choices(self) -> int:
        """Of all periods."""
        return self.periods * self.parts

    def choices_of(self, period: int) -> range:
        """The choices that a period makes, in the order of the heads that make them."""
        return range(period * self.parts, (period + 1) * self.parts)

    def choice_of(self, step: Step, group: int) -> int:
        """The choice that decides what is attended to of one of a step's layer groups."""
        return step.period * self.parts + group % self.parts

    def groups(self, choice: int) -> range:
        """The layer groups that a choice is made for, in layer order."""
        period, part = divmod(choice, self.parts)
        steps = self.period_steps(period)
        return range(steps[0].groups[0] + part, steps[-1].groups[-1] + 1, self.parts)

    def group_rows(self, period: int) -> np.ndarray:
        """The layer groups int [J, G] of each choice that a period makes."""
        return np.array([self.groups(choice) for choice in self.choices_of(period)])


@cache
def group_table(plan: Plan) -> np.ndarray:
    """The layer groups int [choices, G] that each choice is made for, -1 past their end."""
    groups = [list(plan.groups(choice)) for choice in range(plan.choices)]
    table = np.full((len(groups), max(map(len, groups))), -1)
    for row, mine in zip(table, groups, strict=True):
        row[: len(mine)] = mine
    table.flags.writeable = False
    return table
