"""Decode over contexts that do not fit on the device: tokens per second and bytes of every system.

    python -m bench.decode [--quick] [--json OUT] [--plot PNG]

Each sequence stands on a long prefix of its own, whose KV is written straight to the store
(`bench.long_kv`), and goes on with a text that is given, so that all systems see the same queries.
Device memory holds 1/16 of the KV of all sequences, host memory 1/4; both are the engine's own
pools, and reads are direct, so that the page cache holds nothing. With `place="host"` the store
lies in memory (/dev/shm): reads cost a copy. `dense` and `flexgen` attend to everything, the others
to `budget`; `dense` has device memory for it.

In full every system decodes 8 sequences from SSD, those of `RISING` also 1, 2, 4 and 16, and those
of `IN_MEMORY` 8 from memory; `--sequences` and `--places` say it for all. What does not fit this
machine's memory or disk is left out, and `left_out` says why. Systems of one layout share a store,
without what the one before learned of its packs.

A row's tokens take about `row_seconds`: where 16 tokens and 40 more would take longer, it has fewer
(`warm_tokens`, `measured_tokens`). The first are reported apart (`warm_tokens_s`). `device_hits`
and `host_hits` are shares of the packs that tokens selected; `bytes_per_token` is what was read
from the store for a token of one sequence. `exposed_share` is the share of a token's time spent
waiting for selections and packs. `ratio_to_busy` is the time of a token over the larger of two: all
the rest of that time (layers, head and Python, so that it is no floor of computing), and, from SSD,
the bytes read over what fio reads at a pack's size (`read_ms`). `still_ms`, of KVDrive and `ckv`
with 8 sequences from SSD (or those of `--sequences`), is the time of a token of the same texts that
go on by what their questions selected: as much is attended to, nothing is selected or read.
`ratio_to_floor` is the time of a token over the larger of that and `read_ms`. `compiled` counts
programs that were compiled while tokens were timed: 0, as all are compiled before. `ahead_share`
and `unused_share`: packs that reads ahead had when they were selected, and that they brought for
nothing, over all packs read. `kvdrive` is tuned before it is measured (`baselines.kvdrive.tune`),
by other texts over the same prefixes; with `--windows` their size is given. `overlap` is the share
of the time of its look-ups, reads and copies in which something was selected or computed.
`bench.decode_bench:WHOLE_BATCH`, `EVEN`, `NOTHING_AHEAD` and `ONE_BY_ONE` are `kvdrive` with parts
switched off. `peak_mb` is the most that the process held, `budget_mb` weights, pools and digests.
`--windows` and `--budgets` take several values: the ablation. A run that was cut short goes on
where it was (`bench.kept`).
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from bench.common import (
    SHAPES,
    Json,
    add_systems,
    amount,
    budget_share,
    command,
    existing_folder,
    finish,
    positive,
    result_file,
    share,
    table,
    whole,
)
from bench.decode_bench import Bench, Setting
from bench.disk import Disk
from bench.figures import save
from bench.kept import Kept, disk_of

QUICK = Setting(
    systems=("flexgen", "quest", "shadowkv", "retroinfer", "kvdrive", "ckv"), places=("ssd",),
    prefix_tokens=4096, sequences=(2,), rising=(), tokens=16, warm=4, row_seconds=10,
)  # fmt: skip
FULL = Setting()
COLUMNS = (
    "system", "place", "sequences", "tokens", "budget", "window", "tokens_s", "device_hits",
    "host_hits", "bytes_per_token", "exposed_share", "ratio_to_busy", "ratio_to_floor", "compiled",
)  # fmt: skip


def main() -> None:
    """The command."""
    p = command(__doc__)
    p.add_argument("--quick", action="store_true", help="two short prefixes, few tokens")
    p.add_argument("--plot", type=result_file, help="draw the figure into this PNG")
    p.add_argument(
        "--folder", type=existing_folder, help="folder for the stores, on the disk to measure"
    )
    p.add_argument(
        "--timeline", type=result_file, help="write a Perfetto trace of two tokens of kvdrive"
    )
    p.add_argument("--model", choices=SHAPES, help="published shape")
    add_systems(p, generates=True)
    p.add_argument("--places", nargs="+", choices=("ssd", "host"), help="tier of the KV")
    p.add_argument("--sequences", nargs="+", type=positive, help="numbers of sequences at once")
    p.add_argument("--budgets", nargs="+", type=budget_share, help="shares in (0, 1]")
    p.add_argument(
        "--windows", nargs="+", type=_window, help="sizes of the window, in selections, at least 1"
    )
    for option in ("--device-share", "--host-share", "--stay"):
        p.add_argument(option, type=share)
    p.add_argument("--row-seconds", type=amount, help="target seconds of a row")
    for option in ("--prefix-tokens", "--tokens", "--warm", "--seed"):
        p.add_argument(option, type=whole if option in ("--warm", "--seed") else positive)
    setting = setting_of(args := p.parse_args())
    rows: list[Json] = []
    said = dataclasses.asdict(setting)
    kept = Kept(args.json, said | {"disk": disk_of(args.folder)})
    with tempfile.TemporaryDirectory(prefix="ckv-bench-", dir=args.folder) as folder:
        bench = Bench(setting, Path(folder), args.timeline)
        with Disk(Path(folder), file_bytes=256 << 20) as disk:
            for systems in bench.systems():
                for row in bench.rows(systems, disk, kept):
                    rows.append(row)
                    print(table(cells(rows[-1:]), COLUMNS), flush=True)
    print(table(cells(rows), COLUMNS))
    for one in bench.left_out:
        print("left out: " + ", ".join(f"{name} {value}" for name, value in one.items()))
    body = {"setting": said, **kept.said(), "rows": rows, "left_out": bench.left_out}
    result = finish(args, body)
    save("decode", result, args.plot)
    kept.forget()


def _window(text: str) -> float:
    """What `SystemConfig.window` may be, from the command line."""
    if (times := amount(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return times


def setting_of(args: argparse.Namespace) -> Setting:
    """The quick or the full setting, with what was said; numbers of sequences that were said are
    those of every system."""
    said: dict[str, Any] = {name: getattr(args, name, None) for name in Setting.__slots__}
    said = {k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if v is not None}
    if "sequences" in said:
        said["rising"] = ()
    return dataclasses.replace(QUICK if args.quick else FULL, **said)


def cells(rows: list[Json]) -> list[list[object]]:
    """Rows for a table."""
    return [["" if row[c] is None else row[c] for c in COLUMNS] for row in rows]


if __name__ == "__main__":
    main()
