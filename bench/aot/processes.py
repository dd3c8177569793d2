"""Workers in processes of their own: a compiler that crashes, hangs or locks costs one row."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from bench.aot.chips import parted
from bench.aot.compilers import folder
from bench.aot.kernels import KERNELS
from bench.aot.verdict import SAID
from bench.common import Json

START_S = 120.0
"""For a process to come up and load its compiler."""


def compiled_rows(
    target: str, model: str, programs: Sequence[str], *, row_s: float, before: Sequence[Json] = ()
) -> list[Json]:
    """One row a program. A process that ends early is started again behind the row it was at.

    A program that is the very text of one in the rows `before` is not compiled again.
    """
    rows: list[Json] = []
    known = {
        row["digest"]: {name: row[name] for name in SAID} for row in before if row.get("digest")
    }
    alone = [name for name in programs if name in KERNELS]
    for group in ([name for name in programs if name not in KERNELS], alone):
        left = list(group)
        while left:
            order = {"target": target, "model": model, "programs": left, "known": known,
                     "instructions": group is alone}  # fmt: skip
            found = _worker(order, row_s)
            rows += found
            left = left[len(found) :]
    named = {"target": target, "model": model}
    return [named | row for row in rows]


def environment(target: str, dumps: Path, *, instructions: bool) -> dict[str, str]:
    """Of a process that compiles: no device is looked for, and many may run at once."""
    kind = parted(target)[0].kind
    path = [str(folder(kind)), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "JAX_PLATFORMS": "cpu",
        "BENCH_AOT_DUMPS": str(dumps),
    }
    if kind == "gpu":
        return found | {"MOSAIC_GPU_DUMP_TO": str(dumps)}
    found |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if instructions:
        found["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true"
    return found


def _worker(order: Json, row_s: float) -> list[Json]:
    """Rows of the first programs, at least one, until one of them ends the process."""
    rows: list[Json] = []
    programs = order["programs"]
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as errors:
        dumps = Path(scratch)
        with subprocess.Popen(
            [sys.executable, "-m", "bench.aot.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=environment(order["target"], dumps, instructions=order["instructions"]),
        ) as process:  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(order))
            process.stdin.close()
            late = False
            for kind, text in _lines(process.stdout, START_S + row_s, row_s):
                if kind == "row":
                    rows.append({"program": programs[len(rows)]} | json.loads(text))
                elif kind == "late":
                    late = True
                    process.kill()
            code = process.wait()
        if len(rows) < len(programs) and (late or code or not rows):
            errors.seek(0)
            said = [line.strip() for line in errors.read().splitlines() if line.strip()]
            why = f"took longer than {row_s:.0f} s" if late else f"its process ended with {code}"
            if said and not late:
                why += f": {said[-1][:200]}"
            gone = {"compiled": False, "why": why, "status": "failed", "failures": [why]}
            rows.append({"program": programs[len(rows)]} | gone)
    return rows


def _lines(stream: IO[str], first_s: float, row_s: float) -> Iterator[tuple[str, str]]:
    """(word, rest) of each line that is ours; ("late", "") once when one takes too long."""
    until, rest = time.monotonic() + first_s, b""
    number = stream.fileno()
    while True:
        ready, _, _ = select.select([number], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            yield "late", ""
            return
        piece = os.read(number, 1 << 16)
        if not piece:
            return
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            kind, _, text = line.decode(errors="replace").partition(" ")
            if kind in ("begin", "row"):
                until = time.monotonic() + row_s
                yield kind, text
