"""What decode was to show (KVDrive's claims and ours), made of the rows of `bench.decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from bench.common import Json, table

RIVALS = ("quest", "shadowkv", "retroinfer")
OURS = ("kvdrive", "ckv")
TYPICAL = 8
"""Sequences of the comparisons."""
HITS, FLOOR, EXPOSED, QUEST_WAITS = 0.80, 1.3, 0.25, 0.40
RISE, FLAT, FROM_SSD, MEMORY, FEWER = 1.8, 0.10, 0.60, 1.10, 40.0
WINDOWS = (0.0, 3.0)
AT = 1 / 16
"""Budget at which windows of nothing and of three choices are compared."""


def claims(rows: Sequence[Json]) -> list[Json]:
    """Each of what was to be shown that there are rows for: {claim, value, bar, met}."""
    found: list[Json] = []

    def tell(claim: str, value: float | None, bar: float, *, most: bool = False) -> None:
        if value is not None:
            met = value <= bar if most else value >= bar
            found.append({"claim": claim, "value": value, "bar": bar, "most": most, "met": met})

    usual = [row for row in rows if row["window"] != WINDOWS[0] or row["system"] in RIVALS]
    at = {(row["system"], row["place"], row["sequences"]): row for row in reversed(usual)}

    def of(name: str, key: str, place: str = "ssd", n: int = TYPICAL) -> float | None:
        row = at.get((name, place, n))
        return None if row is None else row[key]

    def over(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    for place, bar in (("ssd", 1.7), ("host", 1.23)):
        speeds = [of(name, "tokens_s", place) for name in RIVALS]
        best = max(speeds) if None not in speeds else None  # type: ignore[type-var]
        tell(f"kvdrive over the best rival, {place}", over(of("kvdrive", "tokens_s", place), best),
             bar)  # fmt: skip
        if place == "ssd":
            tell("ckv over the best rival, ssd", over(of("ckv", "tokens_s"), best), 2.5)
    tell("kvdrive over flexgen", over(of("kvdrive", "tokens_s"), of("flexgen", "tokens_s")), 20.0)
    for name in OURS:
        tell(f"{name}: share of packs in windows", of(name, "device_hits"), HITS)
        tell(f"{name}: time over the larger floor", of(name, "ratio_to_floor"), FLOOR, most=True)
        tell(f"{name}: share that waits", of(name, "exposed_share"), EXPOSED, most=True)
        tell(f"{name}: ssd over memory",
             over(of(name, "tokens_s"), of(name, "tokens_s", "host")), FROM_SSD)  # fmt: skip
        _many(name, at, lambda n, key, name=name: of(name, key, n=n), tell)
    tell("quest: share that waits", of("quest", "exposed_share"), QUEST_WAITS)
    _windows(rows, tell)
    return found


Tell = Callable[..., None]


def _many(
    name: str,
    at: dict[tuple[str, str, int], Json],
    of: Callable[[int, str], float | None],
    tell: Tell,
) -> None:
    """What holds as sequences become more."""
    counts = sorted(n for system, place, n in at if (system, place) == (name, "ssd"))
    if len(counts) < 2:
        return
    speeds = [of(n, "tokens_s") or 0.0 for n in counts]
    rises = min(b / a for a, b in pairwise(speeds))
    tell(f"{name}: tokens/s with each doubling of sequences, the least rise", rises, 1.0)
    if {1, TYPICAL} <= set(counts):
        eight, one = of(TYPICAL, "tokens_s"), of(1, "tokens_s")
        tell(f"{name}: tokens/s of {TYPICAL} sequences over 1", (eight or 0) / (one or 1), RISE)
    sizes = [of(n, "bytes_per_token") or 0.0 for n in counts]
    spread = max(sizes) / max(1.0, min(sizes)) - 1
    tell(f"{name}: most bytes a token over fewest, less 1", spread, FLAT, most=True)
    most = counts[-1]
    held, budget = of(most, "peak_mb"), of(most, "budget_mb")
    tell(f"{name}: memory with {most} sequences over weights, budgets and index",
         (held or 0) / (budget or 1), MEMORY, most=True)  # fmt: skip


def _windows(rows: Sequence[Json], tell: Tell) -> None:
    """Bytes without a window over those with a window of three choices."""
    none, wide = (
        {row["system"]: row for row in rows if row["window"] == w and row["budget"] == AT}
        for w in WINDOWS
    )
    for name in none.keys() & wide.keys():
        fewer = none[name]["bytes_per_token"] / max(1.0, wide[name]["bytes_per_token"])
        tell(f"{name}: bytes at x0 over bytes at x3, 6.25%", fewer, FEWER)


def show(found: Sequence[Json]) -> str:
    """The claims as a table."""
    cells = [
        [one["claim"], one["value"], ("≤ " if one["most"] else "≥ ") + f"{one['bar']:g}",
         "met" if one["met"] else "MISSED"]
        for one in found
    ]  # fmt: skip
    return table(cells, ("claim", "value", "bar", "")) if cells else ""
