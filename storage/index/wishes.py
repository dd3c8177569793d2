"""What people want of a prefix: that it stays, how long after its last use, before what else."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields

MOST_PRIORITY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Beside the prefix it is about, in a file of its own: it outlives the index.

    Attributes:
      pinned: never evicted.
      retain_s: seconds after its last use when it expires: it is evicted before all that have not
        expired, and `prune_store(expired=True)` removes it. None: never.
      priority: what has less is evicted first, whatever its score; -1000 to 1000.
    """

    pinned: bool = False
    retain_s: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        seconds = self.retain_s
        if type(self.pinned) is not bool:
            raise ValueError(f"pinned: got {self.pinned!r}, expected a bool")
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and 0 <= seconds < math.inf):
            raise ValueError(f"retain_s: got {seconds!r}, expected None or seconds from 0 on")
        if type(self.priority) is not int or abs(self.priority) > MOST_PRIORITY:
            raise ValueError(
                f"priority: got {self.priority!r}, expected -{MOST_PRIORITY} to {MOST_PRIORITY}"
            )

    def encode(self) -> bytes | None:
        """The file's bytes; None for no wish at all."""
        return None if self == Wish() else json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Wish:
        """Inverse of `encode`; a file that says nothing is a pin: nothing is evicted by mistake."""
        try:
            found = json.loads(data)
            return cls(**{f.name: found[f.name] for f in fields(cls)})
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls(pinned=True)
