"""How much of a prefix takes part: a share of its tokens, or as much as holds a share of attention.

PrefixKV sets one share of cumulated importance in place of a share of tokens;
here the importance is the attention that the selecting queries give, period by period.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from ckv_jax.validate import check_number

_NUMBER = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_MASS = re.compile(rf"mass:{_NUMBER}(?::{_NUMBER}-{_NUMBER})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a request may select in every period.

    Attributes:
      most: the share of the prefix's chunks, in (0, 1], that may be selected.
      mass: the share, in (0, 1], of the selecting queries' attention that the selected chunks must
        hold: no more of them are taken. None: as many as `most` allows.
      least: the share of chunks that is selected in any case; one chunk always is.
    """

    most: float = 1.0
    mass: float | None = None
    least: float = 0.0

    @classmethod
    def of(cls, budget: float | str) -> Self:
        """From a number in (0, 1], "mass:SHARE" or "mass:SHARE:LEAST-MOST".

        Raises `ValueError` for anything else.
        """
        if isinstance(budget, str):
            return cls._by_mass(budget)
        check_number("budget", budget)
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"got budget={budget}, expected a share of the prefix in (0, 1]")
        return cls(most=float(budget))

    @classmethod
    def _by_mass(cls, budget: str) -> Self:
        match = _MASS.fullmatch(budget)
        shares = (match[1], match[2] or "0", match[3] or "1") if match else ("0", "0", "1")
        mass, least, most = map(float, shares)
        if not 0.0 < mass <= 1.0 or not 0.0 <= least <= most <= 1.0 or not most:
            raise ValueError(
                f"got budget={budget!r}, expected a share of the prefix, mass:SHARE or "
                "mass:SHARE:LEAST-MOST, with shares in (0, 1] and LEAST at most MOST"
            )
        return cls(most=most, mass=mass, least=least)

    @property
    def exact(self) -> bool:
        """Whether everything takes part."""
        return self.most == 1.0 and (self.mass in (None, 1.0) or self.least == 1.0)

    def chunks(self, num_chunks: int) -> int:
        """How many of so many chunks (or tokens) may be selected: the smallest integer not below
        the share, at least one."""
        return _share(self.most, num_chunks)

    def floor(self, num_chunks: int) -> int:
        """How many are in any case."""
        return min(_share(self.least, num_chunks), self.chunks(num_chunks))


def _share(share: float, count: int) -> int:
    return max(1, math.ceil(round(share * count, 9)))
