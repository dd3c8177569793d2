"""How many programs JAX compiles, in whatever part of the engine: one listener for all tests."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_seen = 0


def _count(event: str, duration: float, **_: object) -> None:
    global _seen
    _seen += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """Programs compiled in this process so far, those that came from a cache on disk included."""
    return _seen
