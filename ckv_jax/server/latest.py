"""The latest answers, for people who look."""

from __future__ import annotations

from collections import deque

from ckv_jax.trace import Trace

_LATEST = 64


class Latest:
    """The traces of the latest answers."""

    def __init__(self) -> None:
        self._traces: deque[tuple[float, Trace]] = deque(maxlen=_LATEST)

    def add(self, queued_ms: float, trace: Trace) -> None:
        """One more text has had its first token."""
        self._traces.append((queued_ms, trace))

    def breakdown_ms(self) -> dict[str, float]:
        """Mean milliseconds of each stage of the time to first token, waiting included."""
        total: dict[str, float] = {}
        for queued, trace in self._traces:
            for stage, spent in {"queue": queued, **trace.breakdown_ms}.items():
                total[stage] = total.get(stage, 0.0) + spent
        return {stage: spent / len(self._traces) for stage, spent in total.items()}
