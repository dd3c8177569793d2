"""Hurt a store in every way the store promises to survive, in bulk, and count what came of it.

    python -m bench.faults --json OUT [--quick]

Writes {"kinds": {kind: {"injected", "caught", "harmless", "wrong_tokens", "crashes", "hangs"}},
"total": {the same}}. The bar: wrong_tokens, crashes and hangs are 0. The exit status says so, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import result_file
from bench.fault_kinds import corruption, disk, processes
from bench.fault_kinds.tally import Tally, make_store

FULL = {
    "kill -9": 200,
    **dict.fromkeys(corruption.FLIPS, 143),  # 1,001 in all
    **dict.fromkeys(corruption.SHARDS, 40),
    "short reads": 40,
    "full disk": 40,
    "silent disk": 10,
    "rival writers": 30,
    "eviction during reads": 60,
    "vanished folder": 20,
    "bounded store": 40,
    "lying manifests": 200,
    "wrong salt": 60,
    "left writers": 40,
}
"""Faults of each kind; `--quick` makes a tenth of them."""


def kinds(folder: Path) -> dict[str, Callable[[int], Tally]]:
    """Every kind of fault, by name: makes so many of them in `folder`, counts what came of them."""
    pristine = folder / "pristine"
    make_store(pristine)
    runs: dict[str, Callable[[int], Tally]] = {
        "kill -9": lambda n: processes.kills(folder / "kills", n)
    }
    for kind in corruption.FLIPS:
        runs[kind] = lambda n, kind=kind: corruption.flips(pristine, n, kind)  # type: ignore[misc]
    for kind in corruption.SHARDS:
        runs[kind] = lambda n, kind=kind: corruption.shards(pristine, n, kind)  # type: ignore[misc]
    return runs | {
        "short reads": lambda n: corruption.short_reads(pristine, n),
        "full disk": disk.full_disks,
        "silent disk": lambda n: disk.silent_disks(pristine, n),
        "rival writers": lambda n: processes.rivals(folder / "rivals", n),
        "eviction during reads": lambda n: processes.evictions(folder / "evictions", n),
        "vanished folder": lambda n: processes.vanished_folders(pristine, n),
        "bounded store": lambda n: processes.crowded(folder / "crowded", n),
        "lying manifests": lambda n: disk.lies(pristine, n),
        "wrong salt": lambda n: disk.wrong_salts(folder / "salts", n),
        "left writers": lambda n: disk.refused_writes(folder / "left", n),
    }


def main() -> int:
    """Run all kinds; 1 when a fault got through."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--json", type=result_file, metavar="OUT", help="where the counts go")
    parser.add_argument("--quick", action="store_true", help="a tenth of the faults")
    parser.add_argument("--only", choices=FULL, metavar="KIND", help="one kind")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # an index that is lost on purpose need not be reported
    total, found = Tally(), {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, run in kinds(Path(folder)).items():
            if options.only not in (None, kind):
                continue
            start = time.monotonic()
            tally = run(max(1, FULL[kind] // 10) if options.quick else FULL[kind])
            found[kind] = _counts(tally)
            total += tally
            state = "ok" if tally.ok else "FAILED " + "; ".join(tally.notes[:3])
            print(f"{kind:24} {found[kind]} {time.monotonic() - start:.1f} s {state}", flush=True)
    print(f"{'total':24} {_counts(total)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"kinds": found, "total": _counts(total)}, indent=1))
    return 0 if total.ok else 1


def _counts(tally: Tally) -> dict[str, int]:
    counts = dataclasses.asdict(tally)
    del counts["notes"]
    return counts


if __name__ == "__main__":
    sys.exit(main())
