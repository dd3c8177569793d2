"""Whether keeping KV pays: what a token costs to write, and what it costs to compute."""

from __future__ import annotations

_FEWEST = 128  # tokens that say something about the speed of either
_SHARE = 0.3  # of the latest figure in the average
_EVERY = 16  # turns of which one is written all the same, to see whether the disk has recovered


class Pace:
    """Averages of both. Threads may race for an update: a figure less, and no harm."""

    def __init__(self) -> None:
        self.compute_s: float | None = None
        """Seconds a token, prefill."""
        self.write_s: float | None = None
        """Seconds a token, to the store."""
        self._passed_over = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long until the first one after them."""
        if tokens >= _FEWEST:
            self.compute_s = _average(self.compute_s, seconds / tokens)

    def written(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long to be stored."""
        if tokens >= _FEWEST:
            self.write_s = _average(self.write_s, seconds / tokens)

    @property
    def slow_disk(self) -> bool:
        """Whether computing KV again is quicker than writing it, as far as is known."""
        known = self.compute_s is not None and self.write_s is not None
        return known and self.write_s > self.compute_s  # type: ignore[operator]

    def pays(self) -> bool:
        """Whether the next turn should be written; now and then one is, to measure again."""
        if not self.slow_disk:
            return True
        self._passed_over += 1
        return self._passed_over % _EVERY == 0


def _average(before: float | None, now: float) -> float:
    return now if before is None else before + _SHARE * (now - before)
