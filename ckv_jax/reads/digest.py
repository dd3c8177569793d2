"""A prefix's digest on the device, and what a coarse pass has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ckv_jax.kernels_pallas.score.probe import Int4Keys, Probe
from ckv_jax.kernels_pallas.score.turned import turn

_KEPT = 5, 8
"""Of so many dimensions turned keys keep so many: on the reference checkpoint as much as all of
them, while half of them lose answers (`bench/results/NOTEBOOK.md`)."""


@dataclass(slots=True)
class Digest:
    """The probes of the layers that have one. Engine thread only, but `nbytes`."""

    probes: dict[int, Probe]
    """Layer -> its probe, of one length."""
    turns: bool
    """Whether a coarse pass of decode has turned keys, which a CPU scores in a fraction of the
    time (`score/turned.py`)."""
    nbytes: int = field(init=False)
    """Device bytes of all of it; kept, as every token and every look at the engine's state asks for
    it, and JAX takes microseconds for each array's."""
    scorers: dict[tuple[int, bool], Any] = field(default_factory=dict)
    """What calls take of it, made once: `Scorer` of (period, whether it guesses)."""
    _turned: dict[int, Probe] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nbytes = sum(map(_bytes_of, self.probes.values()))

    def rough(self, layers: Sequence[int]) -> list[Probe]:
        """What a coarse pass scores of some layers, made when it is first asked for."""
        found = []
        for layer in layers:
            probe = self.probes[layer]
            if self.turns and isinstance(probe, Int4Keys):
                if layer not in self._turned:
                    self._turned[layer] = turn(probe, dims=_KEPT[0] * probe.shape[2] // _KEPT[1])
                    self.nbytes += _bytes_of(self._turned[layer])
                probe = self._turned[layer]
            found.append(probe)
        return found


def _bytes_of(probe: Probe) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(probe))
