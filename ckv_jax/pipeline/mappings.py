"""Memory mappings of this process, of which Linux allows 65,530 unless it is told otherwise."""

from __future__ import annotations

from pathlib import Path

__all__ = ["allowed", "held"]


def held() -> int:
    """Mappings of this process now; 0 where the system does not tell."""
    try:
        with Path("/proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return 0


def allowed() -> int:
    """How many a process may have; Linux's default where the system does not tell."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 65_530
