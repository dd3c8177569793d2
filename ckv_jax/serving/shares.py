"""What each sequence of a batch asks for of its prefix's attention, and got."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np

from ckv_jax.config import Budget
from ckv_jax.pipeline.executor import FirstToken
from ckv_jax.selection.base import Share
from ckv_jax.trace import Trace


def share_of(budgets: Several[Budget], units: Several[int]) -> Share:
    """How much attention each of a batch's suffixes asks for."""
    mass = [1.0 if budget.mass is None else budget.mass for budget in budgets]
    least = [budget.floor(n) for budget, n in zip(budgets, units, strict=True)]
    return Share(np.array(mass, np.float32), np.array(least, np.int32))


def shares_of(trace: Trace, first: FirstToken, units: list[int]) -> list[Trace]:
    """Each row's own view of the batch's trace: what was read is common, the selection is not."""
    return [
        trace.share(
            selected=[int((chosen[row] >= 0).sum()) for chosen in first.selections],
            total=len(first.selections) * count,
            attention_mass=first.attention_mass[:, row].tolist(),
        )
        for row, count in enumerate(units)
    ]
