"""Paper-scale qualification with one command, on a GPU, a TPU or, with --tiny, anywhere.

    python -m bench.gpu_qualify --out DIR            # 7B, 14B and 32B; resumes where it stopped
    python -m bench.gpu_qualify --tiny --out DIR     # every stage on a toy, under 2 minutes
    python -m bench.gpu_qualify --first --out DIR    # the first ten minutes: see bench.gpu_first

Stages write DIR/<stage>.json and are skipped when that is there: host-to-device bandwidth, disk
bandwidth, the kernels, and for each model the time to first token of every system with both floors,
breakdown and speedups. Weights are random and made on the device, with the structure that
`bench.structured` describes. Nothing is
downloaded. Defaults fit 139 GiB of device memory, 128 GiB of host memory and 64 GiB of disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import gpu_first
from bench.common import (
    PUBLISHED,
    Json,
    Setting,
    add_systems,
    amount,
    budget_share,
    command,
    positive,
    read_json,
    result_folder,
    stamped,
    table,
    write_text,
)
from bench.disk import FILE_BYTES, Disk
from bench.gpu_first import copies
from bench.kernels import kernel_rows
from bench.lab import Lab
from bench.ttft import cold, speedups
from bench.turns import show

FULL = Setting(model="7B", prefixes=1, prefix_tokens=5008, repeats=10, budgets=(0.05, 0.25))
TINY = dataclasses.replace(FULL, model="tiny", prefix_tokens=400, repeats=2, budgets=(0.25,))
BLOCKS = (16 << 10, 32 << 10, 64 << 10, 128 << 10, 1 << 20)
COPY_BYTES = 256 << 20
STAGE_LIMIT_S = 9 * 60


def disk_bandwidth(folder: Path, seconds: float, file_bytes: int) -> Json:
    """Random direct reads by block size, GB/s."""
    with Disk(folder, seconds=seconds, file_bytes=file_bytes) as disk:
        for block in BLOCKS:
            disk.bandwidth(block)
        return {"gb_per_s": disk.found}


def first_tokens(setting: Setting, file_bytes: int) -> Json:
    """All systems on one model."""
    start = time.perf_counter()
    with Lab(setting) as lab, Disk(lab.folder, seconds=1.0, file_bytes=file_bytes) as disk:
        made = time.perf_counter() - start
        rows = cold(lab, disk, ablate=False)
        found = {
            "rows": rows,
            "speedup": speedups(rows),
            "fio_gb_per_s": disk.found,
            "disk_tool": disk.tool,
            "setup_s": made,
            "prefill_s": lab.prefill_s,
            "setting": setting.to_json(),
        }
    return found


def stages(args: argparse.Namespace) -> dict[str, Callable[[], Json]]:
    """Every stage by name, in order."""
    base = TINY if args.tiny else FULL
    names = ("prefix_tokens", "suffix_tokens", "repeats", "budgets", "systems")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    changes: Json = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    base = dataclasses.replace(base, folder=args.out / "scratch", **changes)
    small = 16 if args.tiny else 1
    found: dict[str, Callable[[], Json]] = {
        "copies": lambda: copies(COPY_BYTES // small),
        "disk": lambda: disk_bandwidth(args.out, 3.0 / small, FILE_BYTES // small),
        "kernels": lambda: {"rows": kernel_rows(base)},
    }
    for model in ["tiny"] if args.tiny else args.models:
        setting = dataclasses.replace(base, model=model)
        found[f"ttft-{model}"] = partial(first_tokens, setting, FILE_BYTES // small)
    return found


def first(args: argparse.Namespace) -> None:
    """The stages of `bench.gpu_first`, on the first of the models."""
    base = TINY if args.tiny else dataclasses.replace(FULL, model=args.models[0])
    base = dataclasses.replace(
        base,
        systems=tuple(args.systems or gpu_first.SYSTEMS),
        repeats=args.repeats or base.repeats,
        budgets=tuple(args.budgets or FULL.budgets),
        folder=args.out / "scratch",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    small = 16 if args.tiny else 1
    gpu_first.run(
        args.out / "first.json", base, limit_s=args.limit_s, only=args.only or (), small=small
    )


def report(results: dict[str, Json]) -> str:
    """One text with every figure and the floors beside it."""
    parts = []
    for name in ("copies", "disk"):
        rates = results[name]["gb_per_s"]
        parts.append(f"{name}, GB/s: " + ", ".join(f"{k} {v:.2f}" for k, v in rates.items()))
    rows = results["kernels"]["rows"]
    names = ("kernel", "implementation", "ms", "gb_per_s", "note")
    parts.append(table([[row.get(name, "") for name in names] for row in rows], names))
    for stage, found in results.items():
        if stage.startswith("ttft-"):
            speedup = json.dumps(found["speedup"])
            parts.append(f"{stage}\n{show(found['rows'])}\nspeedup: {speedup}")
    return "\n\n".join(parts)


def main() -> None:
    """The command."""
    p = command(__doc__, result=False)
    p.add_argument(
        "--out", type=result_folder, required=True, help="folder of results, where runs resume"
    )
    p.add_argument("--tiny", action="store_true", help="use a toy model, on any machine")
    p.add_argument("--first", action="store_true", help="run only the stages of bench.gpu_first")
    p.add_argument(
        "--limit-s", type=amount, default=540.0, help="time limit of --first in s (default 540)"
    )
    p.add_argument(
        "--models", nargs="+", choices=PUBLISHED, default=["7B", "14B", "32B"],
        help="published shapes",
    )  # fmt: skip
    add_systems(p)
    p.add_argument("--budgets", type=budget_share, nargs="+", help="shares in (0, 1]")
    p.add_argument("--prefix-tokens", type=positive, help="tokens of each prefix")
    p.add_argument("--suffix-tokens", type=positive, help="tokens of each suffix")
    p.add_argument("--repeats", type=positive, help="measured requests per system and budget")
    p.add_argument("--only", nargs="+", help="run only these stages")
    args = p.parse_args()
    if args.first:
        return first(args)
    runs = stages(args)
    unknown = sorted({*(args.only or ())} - runs.keys())
    if unknown:
        p.error(f"got stages {', '.join(unknown)}, expected some of {', '.join(runs)}")
    # Models have stages of their own; everything else must be as before to be put together.
    apart = ("out", "models", "only", "first", "limit_s")
    said = {k: v for k, v in vars(args).items() if k not in apart}
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Json] = {}
    for name, run in runs.items():
        path = args.out / f"{name}.json"
        if path.is_file():
            results[name] = read_json(path)
            before = results[name].get("arguments")
            if before != said:
                p.error(f"{path} is of {before}, got {said}: name another --out")
            print(f"{name}: done before", flush=True)
            continue
        if args.only and name not in args.only:
            continue
        start = time.perf_counter()
        found = run() | {
            "stage": name,
            "arguments": said,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        found = stamped(found)
        found["stage_s"] = round(time.perf_counter() - start, 1)
        write_text(path, json.dumps(found, indent=1) + "\n")  # a kill must not leave half of it
        results[name] = found
        late = ", over its 9 minutes" if found["stage_s"] > STAGE_LIMIT_S else ""
        print(f"{name}: {found['stage_s']} s{late}", flush=True)
    if {"copies", "disk", "kernels"} <= results.keys():
        text = report(results)
        (args.out / "report.txt").write_text(text + "\n", encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
