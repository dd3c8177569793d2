"""Hurt a store in every way the store promises to survive, and count what came of it.

    python -m tests.faults [--quick] [--json OUT] [--only KIND] [--jobs N]

Writes {"rows": [{"kind", "operation", "states", "caught", "harmless", "wrong_tokens",
"lost_healthy", "evicted_pins", "crashes", "hangs", "leaks"}], "total": {the same counts}, "every",
"skipped": {kind: reason}, "notes": [...], "seconds"}. The bar: everything but states, caught and
harmless is 0. The exit status says so, too. In full it takes the better part of half an hour on two
cores; `--every 6` enumerates a sixth of the states, of every operation and error; `--quick` takes a
minute.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults import corruption, fuzz, model, power, scene, sweep, traced
from tests.faults.tally import MEMORY, Tally, make_store

Tallies = dict[tuple[str, str], Tally]
"""A tally for each (kind, operation)."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of each kind is done.

    Attributes:
      calls, losses, traced: every n-th state of what is enumerated.
      inputs: for each cheap target that is fuzzed.
      examples, steps: runs of the model, and the rules of each at most.
      random: what the numbers of random faults are divided by.
    """

    calls: int = 1
    losses: int = 1
    traced: int = 6
    inputs: int = 2000
    examples: int = 60
    steps: int = 40
    random: int = 1


QUICK = Effort(calls=160, losses=60, traced=900, inputs=60, examples=4, steps=20, random=40)


def sampled(every: int) -> Effort:
    """All kinds in full, but of what is enumerated every so-manieth state: of every operation and
    every error, other calls for each."""
    full = Effort()
    return replace(full, calls=every, losses=every, traced=every * full.traced)


ENUMERATED = ("errno sweep", "power loss", "traced calls", "fuzzing", "model")


def run_all(
    effort: Effort, *, jobs: int, only: str | None, skipped: dict[str, str]
) -> Iterator[Tallies]:
    """Run all kinds, or one; yields tallies as they are there, and notes what could not run."""

    def wanted(kind: str) -> bool:
        return only in (None, kind)

    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="ckv-faults-") as name:
        scenes = Path(name) / "scenes"
        scenes.mkdir()
        scene.prepare(scenes)
        if wanted("errno sweep"):
            yield sweep.sweep(scenes, jobs=jobs, step=effort.calls)
        if wanted("power loss"):
            yield power.power_losses(scenes, jobs=jobs, step=effort.losses)
        if wanted("traced calls"):
            if reason := traced.missing():
                skipped["traced calls"] = reason
            else:
                yield traced.trace(scenes, jobs=jobs, step=effort.traced)
        if wanted("fuzzing"):
            yield fuzz.fuzz(scenes, effort.inputs, jobs=jobs)
        if wanted("model"):
            yield {
                ("model", "all"): model.run_machine(model.Counting, effort.examples, effort.steps)
            }
    with tempfile.TemporaryDirectory() as name:
        make_store(Path(name) / "pristine")
        for kind, (count, run) in corruption.RUNS.items():
            if wanted(kind):
                faults = run(Path(name) / "pristine", max(1, count // effort.random))
                yield {(kind, "read"): faults}


def main() -> int:
    """Run all kinds; 1 when a fault got through."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the counts go")
    parser.add_argument("--quick", action="store_true", help="a small part of the states")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="every N-th of the states enumerated"
    )
    parser.add_argument(
        "--only", choices=(*ENUMERATED, *corruption.RUNS), metavar="KIND", help="one kind"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    options = parser.parse_args()
    if min(options.every, options.jobs) < 1:
        parser.error(f"got --every {options.every} --jobs {options.jobs}, expected 1 or more")
    logging.disable(logging.WARNING)  # an index that is lost on purpose need not be reported
    start, since = time.monotonic(), time.monotonic()
    found: Tallies = {}
    skipped: dict[str, str] = {}
    effort = QUICK if options.quick else sampled(options.every)
    for tallies in run_all(effort, jobs=options.jobs, only=options.only, skipped=skipped):
        for (kind, operation), tally in sorted(tallies.items()):
            state = "ok" if tally.ok else "FAILED " + "; ".join(tally.notes[:2])
            counts = " ".join(f"{name} {n}" for name, n in tally.counts.items() if n)
            print(f"{kind:24} {operation:16} {counts} {state}", flush=True)
        print(f"  … {time.monotonic() - since:.1f} s", flush=True)
        since = time.monotonic()
        found |= tallies
    for kind, reason in skipped.items():
        print(f"{kind:24} skipped: {reason}")
    total = sum(found.values(), Tally())
    print(f"{'total':24} {total.counts} in {time.monotonic() - start:.0f} s")
    if options.json:
        report = {
            "command": " ".join(["python -m tests.faults", *sys.argv[1:]]),
            "every": options.every,
            "rows": [
                {"kind": kind, "operation": operation, **tally.counts}
                for (kind, operation), tally in sorted(found.items())
            ],
            "total": total.counts,
            "skipped": skipped,
            "notes": total.notes,
            "seconds": round(time.monotonic() - start, 1),
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if total.ok else 1


if __name__ == "__main__":
    sys.exit(main())
