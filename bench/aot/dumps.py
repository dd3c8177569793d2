"""What compilers write beside a program: a GPU assembler's log, a TPU's instruction counts."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_LAUNCH = re.compile(
    r"blocks in \(%c(\d+)\w*, %c(\d+)\w*, %c(\d+)\w*\).*dynamic_shared_memory_size %c(\d+)_i32"
)
_BUNDLES = "final_hlo-static-per-bundle-utilization.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels:
    """The worst of a program's kernels."""

    spill_bytes: int
    """Stored and loaded, by one thread."""
    registers: int
    shared_bytes: int
    blocks: int
    """Thread blocks of the largest grid."""


def gpu_kernels(folder: Path) -> GpuKernels | None:
    """What the assembler said of the kernels in `folder`; None if it compiled none."""
    logs = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.ptxas"))]
    if not logs:
        return None
    text = "\n".join(logs)
    launches = [_launch(path) for path in folder.glob("*.mlir-passes.log")]
    return GpuKernels(
        spill_bytes=max((int(a) + int(b) for a, b in _SPILLS.findall(text)), default=0),
        registers=max(map(int, _REGISTERS.findall(text)), default=0),
        shared_bytes=max((shared for _, shared in launches), default=0),
        blocks=max((blocks for blocks, _ in launches), default=0),
    )


def _launch(log: Path) -> tuple[int, int]:
    """Thread blocks, and bytes of shared memory of each."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = _LAUNCH.search(line)
            if found:
                *blocks, shared = map(int, found.groups())
                return math.prod(blocks), shared
    return 0, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundles:
    """A TPU kernel's instructions, as they stand in memory: loops are not multiplied."""

    count: int
    scalar: int
    """Slots that compute addresses and the like."""
    spills: int
    """Vector registers stored for want of room."""


def bundles(text: str) -> Bundles:
    """From libtpu's table of a kernel's final instructions.

    Raises:
      ValueError: a table of another form.
    """
    head, _, body = text.partition("== UTILIZATION:")
    names = [
        name.strip() for line in head.splitlines() if "MXU" in line for name in line.split(",")
    ]
    if "VSTORE:SPILL" not in names or "SALU" not in names:
        raise ValueError(f"got columns {names}, expected VSTORE:SPILL and SALU among them")
    rows = [[int(cell) for cell in line.split()] for line in body.splitlines() if line.strip()]
    spill, scalar = names.index("VSTORE:SPILL"), names.index("SALU")
    return Bundles(
        count=len(rows),
        scalar=sum(row[scalar] for row in rows),
        spills=sum(row[spill] for row in rows),
    )


def tpu_kernels(folder: Path, names: Iterable[str]) -> list[Bundles]:
    """Of the instructions `names` of the program that was compiled last."""
    found = []
    for name in names:
        stem = re.compile(rf"\d+-{re.escape(name)}-\d+-{re.escape(_BUNDLES)}")
        tables = [path for path in folder.iterdir() if stem.fullmatch(path.name)]
        found += [bundles(path.read_text(encoding="utf-8")) for path in tables]
    return found


def empty(folder: Path) -> None:
    """Removes what is in `folder`."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
