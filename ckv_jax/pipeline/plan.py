"""Which layers run together: periods that share a selection, subperiods that share a call."""

from __future__ import annotations

from dataclasses import dataclass

from ckv_jax.config import Heads, SystemConfig, scoring_layers


@dataclass(frozen=True, slots=True)
class Step:
    """One subperiod: the layers of one jitted call and the packs that hold their KV."""

    index: int
    layers: range
    groups: range
    """Layer groups (packs) of these layers."""
    period: int
    selects: bool
    """Whether a selection is made before this step, at its first layer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A model's layers in order; the last period, subperiod and pack may be shorter."""

    steps: tuple[Step, ...]
    periods: int
    score_layers: int
    """How many layers of a period a question asks, at most."""
    heads: Heads = ()
    """`SystemConfig.heads`."""

    @classmethod
    def of(cls, num_layers: int, system: SystemConfig) -> Plan:
        """The plan of `num_layers` layers: period p, subperiod sp and pack of `system`."""
        if num_layers < 1:
            raise ValueError(f"got num_layers={num_layers}, expected at least 1")
        pack = system.pack_layers
        steps = tuple(
            Step(
                index=index,
                layers=range(first, min(first + system.subperiod, num_layers)),
                groups=range(first // pack, -(-min(first + system.subperiod, num_layers) // pack)),
                period=first // system.period,
                selects=first % system.period == 0,
            )
            for index, first in enumerate(range(0, num_layers, system.subperiod))
        )
        return cls(
            steps=steps,
            periods=-(-num_layers // system.period),
            score_layers=system.choose.score_layers,
            heads=system.heads,
        )

    def period_steps(self, period: int) -> tuple[Step, ...]:
        """The subperiods of one period, in order; empty past the last."""
        return tuple(step for step in self.steps if step.period == period)

    def first_layer(self, period: int) -> int:
        """The layer whose queries select for this period."""
        return self.period_steps(period)[0].layers[0]

    def scoring_layers(self, period: int, most: int | None = None) -> list[int]:
        """The layers whose queries select for this period, see `Select.score_layers`: so many at
        most (None: as many as a question asks)."""
        steps = self.period_steps(period)
        layers = range(steps[0].layers[0], steps[-1].layers[-1] + 1)
        return scoring_layers(layers, self.score_layers if most is None else most, self.heads)

    def guessing_layers(self, period: int) -> list[int]:
        """The layers that guess what this period will choose, before its own hidden state is there:
        the first that scores, or where each has a head alone all of them."""
        layers = self.scoring_layers(period)
        return layers if self.heads else layers[:1]

    def groups(self, period: int) -> range:
        """The layer groups of a period, in layer order."""
        steps = self.period_steps(period)
        return range(steps[0].groups[0], steps[-1].groups[-1] + 1)
