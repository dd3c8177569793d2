"""Compiles every program of a request for TPUs and GPUs that this machine lacks; lists the results.

    make aot ARGS="--json bench/results/aot.json"       # all targets and models: hours
    python -m bench.aot --target v5e H100 --model 0.5B 7B --json OUT --resume

One row a program: the implementation that dispatch took and why, seconds to compile, bytes, what
the compiler estimates, registers and spills of a GPU's kernels, instructions of a TPU's. A row
fails where it copies the whole pool, needs more temporary memory than its arithmetic explains,
loses a donation, falls to a reference although the device could do better, spills registers, or
does not fit although the weights do. Nothing runs on a device; XLA's seconds are its own model's.
Programs are of four layers; `fits` is about the whole model. Kernels also stand by themselves.
Of a model that is split, bytes are one device's, and a row fails where devices send each other
anything other than two sums per layer and one per selection. A program that is word for word one
that was compiled for such a device is not compiled again (`compiled_for` says for which).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from bench.aot.chips import CHIPS, parted
from bench.aot.compilers import KINDS, installed, trouble
from bench.aot.kernels import KERNELS
from bench.aot.processes import compiled_rows
from bench.aot.programs import PROGRAMS, SPLIT
from bench.aot.shapes import MODELS, PREFIX, SUFFIX
from bench.common import Json, amount, command, existing_path, finish, positive, read_rows, table
from ckv_jax.model.shardings import check_divides

COLUMNS = (
    "target", "model", "program", "implementation", "status", "compile_s", "MB", "temp MB",
    "ms", "copies", "bundles", "grid", "spills", "bytes/must", "registers", "shared",
)  # fmt: skip
KEY = ("target", "model", "program")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is compiled."""

    targets: tuple[str, ...]
    models: tuple[str, ...]
    programs: tuple[str, ...]
    row_s: float

    def to_json(self) -> Json:
        """Plain JSON values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        versions = {name: said for kind in KINDS for name, said in installed(kind).items()}
        sizes = {"prefix_tokens": PREFIX, "suffix_tokens": SUFFIX}
        return values | sizes | {"compilers": versions}


def rows_of(
    target: str,
    model: str,
    programs: Sequence[str],
    row_s: float,
    before: Sequence[Sequence[Json]] = (),
) -> list[Json]:
    """All rows of one device and model; what cannot be had says why. `before`: rows that are
    there, of several runs."""
    known, why = False, None
    try:
        chip, devices = parted(target)
        known = model in MODELS
        if not known:
            why = f"unknown model, expected one of {', '.join(MODELS)}"
        else:
            why = trouble(chip.kind)
        if known and devices > 1:
            check_divides(MODELS[model], devices)
    except ValueError as error:
        known, why = False, str(error)
    if why is None:
        return compiled_rows(
            target, model, programs, row_s=row_s, before=[*itertools.chain(*before)]
        )
    status = "skipped" if known else "failed"
    nothing = {"compiled": False, "why": why, "status": status, "failures": []}
    named = {"target": target, "model": model}
    return [named | {"program": name} | nothing for name in (programs if known else ("all",))]


def shown(row: Json) -> list[object]:
    """One line of the table."""

    def of(name: str, scale: float = 1.0) -> object:
        value = row.get(name)
        return "" if value is None else value if scale == 1.0 else f"{value / scale:.1f}"

    ms, must = row.get("optimal_ms"), row.get("must_read_bytes")
    moved = row.get("kernel_bytes") or row.get("declared_bytes")
    ratio = moved / must if moved and must else None  # of bytes; None: its compiler does not say
    return [
        *(of(name) for name in KEY), of("implementation"), row["status"], of("compile_s"),
        of("argument_bytes", 1e6), of("temp_bytes", 1e6), "" if ms is None else f"{ms:.2f}",
        of("pool_copies"), of("bundles"),
        of("grid_steps") if row.get("blocks") is None else of("blocks"),
        of("spill_bytes") if row.get("spill_stores") is None else of("spill_stores"),
        "" if ratio is None else f"{ratio:.2f}",
        of("registers"), of("shared_bytes"),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if a row failed."""
    p = command(__doc__, prog="python -m bench.aot")
    p.add_argument(
        "--target", nargs="+", default=list(CHIPS),
        help=f"{', '.join(CHIPS)}; v5e:4 means a model split over 4 devices of a TPU (2, 4 or 8)",
    )  # fmt: skip
    p.add_argument("--model", nargs="+", default=list(MODELS), help=", ".join(MODELS))
    every = (*PROGRAMS, *KERNELS)
    p.add_argument(
        "--program", nargs="+", default=list(every), choices=every, metavar="PROGRAM",
        help=", ".join(every),
    )  # fmt: skip
    p.add_argument(
        "--without", nargs="+", default=[], choices=every, metavar="PROGRAM", help="skip these"
    )
    p.add_argument("--jobs", type=positive, default=1, help="devices and models compiled at once")
    p.add_argument("--resume", action="store_true", help="keep the rows of an existing --json file")
    p.add_argument("--row-s", type=amount, default=600.0, help="maximum seconds of one program")
    p.add_argument(
        "--like", nargs="+", default=[], type=existing_path, metavar="FILE",
        help="results of earlier runs; a program identical to one of theirs is not compiled again",
    )  # fmt: skip
    args = p.parse_args(argv)
    asked = Asked(
        targets=tuple(args.target),
        models=tuple(args.model),
        programs=tuple(name for name in args.program if name not in args.without),
        row_s=args.row_s,
    )
    rows = kept(args.json) if args.resume else []
    done = {tuple(row[name] for name in KEY) for row in rows}
    like = [row for path in args.like for row in read_rows(path)]
    with ThreadPoolExecutor(args.jobs) as pool:
        parts = {}
        for target, model in itertools.product(asked.targets, asked.models):
            own = [name for name in asked.programs if ":" not in target or name in SPLIT]
            left = [name for name in own if (target, model, name) not in done]
            if left:
                part = pool.submit(rows_of, target, model, left, asked.row_s, (like, rows))
                parts[part] = f"{target} {model}"
        for part in as_completed(parts):
            rows += part.result()
            counts = Counter(row["status"] for row in part.result())
            print(f"{parts[part]}: {dict(counts)}", flush=True)
            if args.json is not None:
                finish(args, {"setting": asked.to_json(), "rows": rows})
    print(table([shown(row) for row in rows], COLUMNS))
    failed = [row for row in rows if row["status"] == "failed"]
    for row in rows:
        if row["status"] != "ok":
            where = " ".join(row[name] for name in KEY)
            print(f"{row['status'].upper()} {where}: {row['why']}")
    counts = Counter(row["status"] for row in rows)
    print(f"{len(rows)} rows: " + ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    return 1 if failed else 0


def kept(path: Path | None) -> list[Json]:
    """Rows of a run that was cut short, without those that no compiler was asked for."""
    if path is None:
        raise SystemExit("--resume needs --json FILE, the file to go on from")
    if not path.is_file():
        return []
    rows = read_rows(path)
    return [row for row in rows if row["status"] != "skipped" and row["program"] != "all"]


if __name__ == "__main__":
    raise SystemExit(main())
