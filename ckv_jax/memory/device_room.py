"""What devices have left, as they say themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["device_room"]


def device_room(devices: Iterable[Any]) -> int | None:
    """Bytes that the fullest of some `jax.Device`s has left; None where one does not say.

    A CPU does not: it computes in the host's memory.
    """
    left = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats or "bytes_in_use" not in stats:
            return None
        left.append(int(stats["bytes_limit"]) - int(stats["bytes_in_use"]))
    return min(left, default=None)
