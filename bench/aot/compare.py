"""Two runs of `bench.aot`, before and after a change: `python -m bench.aot.compare BEFORE AFTER`.

One line for each program that both have, where anything differs: instructions of a TPU's kernels as
they stand in memory, and times the steps of their grid; temporary bytes; whole-pool copies; spills;
a kernel's bytes over what it must read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.common import Json, existing_path, table
from bench.json_file import read_rows

KEY = ("target", "model", "program")
COLUMNS = (*KEY, "status", "bundles", "x steps", "temp MB", "copies", "spills", "bytes/must", "ms")


def facts(row: Json) -> list[float | None]:
    """What is compared; None where a compiler says nothing."""
    bundles, steps = row.get("bundles"), row.get("grid_steps")
    moved, must = row.get("kernel_bytes") or row.get("declared_bytes"), row.get("must_read_bytes")
    spilled = row.get("spill_stores")
    return [
        bundles,
        bundles * steps if bundles and steps else None,
        row["temp_bytes"] / 1e6,
        row["pool_copies"],
        row.get("spill_bytes") if spilled is None else spilled,
        moved / must if moved and must else None,
        row.get("optimal_ms"),
    ]


def compared(before: Sequence[Json], after: Sequence[Json]) -> list[list[object]]:
    """The table's lines."""
    old = {tuple(row[name] for name in KEY): row for row in before if row["compiled"]}
    lines: list[list[object]] = []
    for row in after:
        key = tuple(row[name] for name in KEY)
        if not row["compiled"] or key not in old:
            continue
        pairs = list(zip(facts(old[key]), facts(row), strict=True))
        if all(then == now for then, now in pairs):
            continue
        status = f"{old[key]['status']} → {row['status']}"
        lines.append([*key, status, *(_change(then, now) for then, now in pairs)])
    return lines


def _change(then: float | None, now: float | None) -> str:
    if then is None and now is None:
        return ""
    shown = ["–" if x is None else f"{x:.4g}" for x in (then, now)]
    return shown[0] if shown[0] == shown[1] else " → ".join(shown)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    p = argparse.ArgumentParser(
        prog="python -m bench.aot.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("before", type=existing_path)
    p.add_argument("after", type=existing_path)
    args = p.parse_args(argv)
    lines = compared(*(read_rows(path) for path in (args.before, args.after)))
    print(table(lines, COLUMNS) if lines else "nothing differs")


if __name__ == "__main__":
    main()
