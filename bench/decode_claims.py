"""What decode was to show (KVDrive's claims and ours), made of the rows of `bench.decode`.

Every one is listed, whatever rows there are: `value` is None where rows are missing, `why` says
which, and `met` is False. What is of another setting than `SETTING` says so in `claim`, and is not
judged: `met` is None. So is what another benchmark measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bench.common import Json, table

RIVALS = ("quest", "retroinfer", "shadowkv")
OURS = ("ckv", "kvdrive")
EVERYTHING = ("dense", "flexgen")
TYPICAL, MOST = 8, 16
"""Sequences of the comparisons, and of the claim about memory."""
COUNTS = (1, TYPICAL, MOST)
"""Sequences that have to be there to say what more of them do."""
HITS, FLOOR, EXPOSED, QUEST_WAITS = 0.80, 1.3, 0.25, 0.40
RISE, FLAT, FROM_SSD, MEMORY, FEWER = 1.8, 0.10, 0.60, 1.10, 40.0
BUDGET = 1 / 64
SETTING: Json = {
    "model": "kv7b-thin", "prefix_tokens": 32_768, "device_share": 1 / 16, "host_share": 1 / 4,
    "windows": (None,), "overfetch": None,
}  # fmt: skip
"""What is to hold for claims to be judged, beside the budget."""
WINDOWS = (0.0, 3.0)
AT = 1 / 16
"""Budget at which windows of nothing and of three choices are compared."""
ELSEWHERE = {
    "greedy tokens equal transformers' at budget 1": "the tests compare them",
    "lookahead over lru at x2: more hits": "bench.decode_cache measures it",
    "bytes of 2D widths over those of even ones": "bench.decode_cache measures it",
    "accuracy of kvdrive, ckv and rivals": "bench.decode_accuracy measures it",
    "10,000 steps without growth": "bench.long_decode measures it",
}


class Claims:
    """Claims over the rows of one setting."""

    def __init__(self, rows: Sequence[Json], setting: Json) -> None:
        """`setting`: a `decode_bench.Setting`'s, as JSON."""
        self.found: list[Json] = []
        budgets = setting["budgets"]
        budget = BUDGET if BUDGET in budgets else min(budgets)
        other = {
            name: setting[name]
            for name, value in SETTING.items()
            if (tuple(setting[name]) if name == "windows" else setting[name]) != value
        } | ({"budget": budget} if budget != BUDGET else {})
        self._other = ", ".join(f"{name} {value}" for name, value in other.items())
        self._at = {
            (row["system"], row["place"], row["sequences"]): row
            for row in reversed(rows)
            if row["budget"] == budget or row["system"] in EVERYTHING
        }
        self._missing: list[str] = []

    def of(self, name: str, key: str, place: str = "ssd", n: int = TYPICAL) -> float | None:
        """A number of a row; None where there is none, which is noted."""
        row = self._at.get((name, place, n))
        value: float | None = None if row is None else row[key]
        if value is None:
            self._missing.append(f"no {key} of {name}, {place}, {n}")
        return value

    def over(self, above: float | None, below: float | None) -> float | None:
        """A ratio; None where there is none, which is noted."""
        if above is None or below is None:
            return None
        if below == 0:
            self._missing.append(f"{above:g} over 0")
            return None
        return above / below

    def tell(self, claim: str, value: float | None, bar: float, *, most: bool = False) -> None:
        """One claim, of numbers that were asked for since the one before."""
        why = "; ".join(dict.fromkeys(self._missing))
        self._missing.clear()
        met: bool | None = value is not None and (value <= bar if most else value >= bar)
        if self._other:
            claim, met = f"{claim} ({self._other})", None
            why = "; ".join(filter(None, (why, "another setting")))
        self.note(claim, value, bar, most=most, met=met, why=why)

    def note(
        self, claim: str, value: float | None, bar: float | None, *, most: bool, met: bool | None,
        why: str,
    ) -> None:  # fmt: skip
        """One claim, judged already."""
        said: Json = {"claim": claim, "value": value, "bar": bar, "most": most, "met": met}
        self.found.append(said | ({"why": why} if why else {}))

    def best(self, place: str) -> float | None:
        """Tokens per second of the best rival; None where one of them is missing."""
        speeds = [self.of(name, "tokens_s", place) for name in RIVALS]
        known = [speed for speed in speeds if speed is not None]
        return max(known) if len(known) == len(speeds) else None

    def compare(self) -> None:
        """Systems with each other, and each with bars."""
        of, over, tell = self.of, self.over, self.tell
        ssd, host = "kvdrive over the best rival, ssd", "kvdrive over the best rival, host"
        tell(ssd, over(of("kvdrive", "tokens_s"), self.best("ssd")), 1.7)
        tell(host, over(of("kvdrive", "tokens_s", "host"), self.best("host")), 1.23)
        tell("ckv over the best rival, ssd", over(of("ckv", "tokens_s"), self.best("ssd")), 2.5)
        flexgen = over(of("kvdrive", "tokens_s"), of("flexgen", "tokens_s"))
        tell("kvdrive over flexgen", flexgen, 20.0)
        for name in OURS:
            tell(f"{name}: share of packs in windows", of(name, "device_hits"), HITS)
            ratio = of(name, "ratio_to_floor")
            tell(f"{name}: time over the larger floor", ratio, FLOOR, most=True)
            tell(f"{name}: share that waits", of(name, "exposed_share"), EXPOSED, most=True)
            memory = over(of(name, "tokens_s"), of(name, "tokens_s", "host"))
            tell(f"{name}: ssd over memory", memory, FROM_SSD)
            self._many(name)
        tell("quest: share that waits", of("quest", "exposed_share"), QUEST_WAITS)

    def _many(self, name: str) -> None:
        """What holds as sequences become more."""
        there = {n for system, place, n in self._at if (system, place) == (name, "ssd")}
        counts = sorted({*COUNTS, *there})
        speeds = [self.of(name, "tokens_s", n=n) for n in counts]
        rises = [self.over(b, a) for a, b in pairwise(speeds)]
        known = [rise for rise in rises if rise is not None]
        rise = min(known) if len(known) == len(rises) else None
        self.tell(f"{name}: tokens/s with each doubling of sequences, the least rise", rise, 1.0)
        more = self.over(*(self.of(name, "tokens_s", n=n) for n in (TYPICAL, 1)))
        self.tell(f"{name}: tokens/s of {TYPICAL} sequences over 1", more, RISE)
        sizes = [self.of(name, "bytes_per_token", n=n) for n in counts]
        read = [size for size in sizes if size is not None]
        spread = self.over(max(read), min(read)) if len(read) == len(sizes) else None
        spread = None if spread is None else spread - 1
        self.tell(f"{name}: most bytes a token over fewest, less 1", spread, FLAT, most=True)
        held = self.over(*(self.of(name, key, n=MOST) for key in ("peak_mb", "budget_mb")))
        self.tell(f"{name}: memory with {MOST} sequences over weights, budgets and index", held,
                  MEMORY, most=True)  # fmt: skip

    def windows(self, rows: Sequence[Json], setting: Json) -> None:
        """Bytes without a window over those with a window of three choices, of each of ours: where
        device memory has room for such a window, and none in host memory hides what it misses."""
        for name in OURS:
            sizes = [
                (row["bytes_per_token"], row)
                for window in WINDOWS
                for row in rows
                if (row["system"], row["window"], row["budget"]) == (name, window, AT)
            ]
            claim = f"{name}: bytes at x0 over bytes at x3, {AT:.2%}"
            if len(sizes) != len(WINDOWS):
                why = f"no two rows of windows {WINDOWS[0]:g} and {WINDOWS[1]:g} at that budget"
                self.note(claim, None, FEWER, most=False, met=False, why=why)
                continue
            (none, row), (wide, _) = sizes
            claim += (
                f" ({row['sequences']} x {row['tokens']:,} tokens, {setting['model']}, "
                f"device {setting['device_share']:g}, host {setting['host_share']:g})"
            )
            value, why = (none / wide, "") if wide else (None, f"{none:.0f} bytes at x0, 0 at x3")
            met: bool | None = none >= FEWER * wide and none > 0
            if setting["host_share"]:
                met, why = None, "host memory hides what windows miss"
            self.note(claim, value, FEWER, most=False, met=met, why=why)


def claims(rows: Sequence[Json], setting: Json) -> list[Json]:
    """Each of what was to be shown: {claim, value, bar, most, met}, and `why` it is not judged or
    has no value. `setting`: what rows are of, a `decode_bench.Setting` as JSON."""
    made = Claims(rows, setting)
    made.compare()
    made.windows(rows, setting)
    for claim, why in ELSEWHERE.items():
        made.note(claim, None, None, most=False, met=None, why=why)
    return made.found


def show(found: Sequence[Json]) -> str:
    """The claims as a table."""
    words = {True: "met", False: "MISSED", None: "not judged"}
    cells = [
        [one["claim"], "" if one["value"] is None else one["value"],
         "" if one["bar"] is None else ("≤ " if one["most"] else "≥ ") + f"{one['bar']:g}",
         words[one["met"]], one.get("why", "")]
        for one in found
    ]  # fmt: skip
    return table(cells, ("claim", "value", "bar", "", ""))
