"""Fuzzing: what is read from a disk, changed by Hypothesis."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.faults import farm
from tests.faults.fuzz_targets import Target, bounded, feed, targets
from tests.faults.tally import HANG_S, Tally

TARGETS = (
    "manifest", "layout", "config.json", "safetensors", "catalog", "catalog rows", "digest",
    "digest that fits", "store.json",
)  # fmt: skip
COSTS = {"catalog": 40, "catalog rows": 40, "digest": 20, "digest that fits": 20}

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from((0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 10**400)),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(("", "AAAA", "A" * 4000, "../../x", "/etc/passwd", "0" * 32, "\x00", "\ud800")),
)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
_TABLES = {
    "segments": "id checksum start first end parent links bytes used score tenant".split(),
    "quarantine": "id checksum chunk reason".split(),
    "scores": "id rows importance frequency".split(),
    "reservations": "name bytes tenant".split(),
    "evictions": "number id prefix tenant bytes time reason".split(),
}


@st.composite
def changed(draw: st.DrawFn, value: Any) -> bytes:
    """JSON that was `value`, and had values replaced, removed, nested, or bytes of it changed."""
    how = draw(st.integers(0, 19))
    if how == 0:
        depth = draw(st.sampled_from((10, 900, 100_000)))
        return draw(st.sampled_from((b"[", b'{"a":'))) * depth
    if how == 1:
        names = draw(st.sampled_from((10, 1_000, 10_000)))
        each = json.dumps(next(iter(value.values())) if isinstance(value, dict) else value)
        same = draw(st.booleans())
        pairs = (f'"{0 if same and i == names - 1 else i}":{each}' for i in range(names))
        return ("{" + ",".join(pairs) + "}").encode()
    whole = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        whole = _change(draw, whole)
    text = json.dumps(whole).encode()
    return draw(damaged(text)) if how == 2 else text


def _change(draw: st.DrawFn, value: Any) -> Any:
    """Change one place below `value`."""
    inside = isinstance(value, dict | list) and len(value) > 0
    if not inside or draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    keys = sorted(value) if isinstance(value, dict) else range(len(value))
    key = draw(st.sampled_from(list(keys)))
    how = draw(st.integers(0, 9))
    if how == 0:
        value.pop(key)
    elif how == 1 and isinstance(value, dict):
        value[draw(st.text(max_size=8))] = value[key]
    else:
        value[key] = _change(draw, value[key])
    return value


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with bytes flipped, cut, blanked, repeated or put in."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        size = draw(st.sampled_from((1, 4, 100, 5000)))
        how = draw(st.sampled_from(("flip", "cut", "blank", "repeat", "put", "end")))
        if how == "flip" and found:
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del found[at : at + size]
        elif how == "blank":
            found[at : at + size] = bytes(len(found[at : at + size]))
        elif how == "repeat":
            found[at:at] = found[at : at + size]
        elif how == "put":
            found[at:at] = draw(st.binary(min_size=1, max_size=16))
        else:
            del found[at:]
    return bytes(found)


@st.composite
def rows(draw: st.DrawFn) -> bytes:
    """A table and a column of the index, and what all its rows hold from now on."""
    table = draw(st.sampled_from(sorted(_TABLES)))
    return json.dumps([table, draw(st.sampled_from(_TABLES[table])), draw(_LEAVES)]).encode()


def fuzz(
    folder: Path, inputs: int, *, jobs: int, names: tuple[str, ...] = TARGETS
) -> dict[tuple[str, str], Tally]:
    """Feed each target `inputs` inputs, dear ones fewer; a tally for each (kind, target)."""
    jobs = min(jobs, len(names))  # each makes all targets first
    tallies: dict[tuple[str, str], Tally] = {}
    run, batches = partial(feed_all, folder, inputs), [list(names[i::jobs]) for i in range(jobs)]
    for name, result in farm.run(run, batches, jobs=jobs, timeout_s=HANG_S * 5):
        if not isinstance(result, Tally):
            hung = result == "hang"
            result = Tally(1, hangs=hung, crashes=not hung, notes=[f"{name}: {result}"])
        tallies["fuzzed", name] = result
    return tallies


def feed_all(
    folder: Path, inputs: int, names: list[str], report: Callable[[int, Any], None]
) -> None:
    """Feed some targets, in a process whose memory is bounded."""
    logging.disable(logging.WARNING)
    place = folder / f"fuzz-{os.getpid()}"
    place.mkdir()
    made = targets(place)
    for i, name in enumerate(names):
        most = max(8, inputs // COSTS.get(name, 1))
        report(i, _feed(name, made[name], most, partial(report, i, None)))
    shutil.rmtree(place, ignore_errors=True)


def _feed(name: str, target: Target, inputs: int, begin: Callable[[], None]) -> Tally:
    tally = Tally()
    if name == "catalog rows":
        kinds = [rows()]
    else:
        kinds = [damaged(s) if isinstance(s, bytes) else changed(s) for s in target.seeds]

    @seed(0)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(kinds))
    def one(data: bytes) -> None:
        begin()
        count(tally, feed(target, data), f"{name}: {data[:60]!r}")

    with bounded():
        one()
    return tally


def count(tally: Tally, found: str, what: str) -> None:
    """Take what came of an input into a tally."""
    tally.states += 1
    if found == "answer":
        tally.harmless += 1
    elif found == "caught":
        tally.caught += 1
    else:
        slow = found.startswith(("slow", "hang"))
        wrong = found.startswith("AssertionError")
        tally.hangs += slow
        tally.wrong_tokens += wrong
        tally.crashes += not slow and not wrong
        tally.notes.append(f"fuzzed {what}: {found}")
