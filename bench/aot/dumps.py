"""Compiler output besides the program: assembler logs, instruction counts, HLO."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
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


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\(")
_SHAPE = re.compile(r"\b[a-z][a-z0-9]*\[([\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_COPIES = frozenset(
    ("copy", "copy-start", "transpose", "convert", "reshape", "concatenate", "pad", "reverse")
)
"""Instructions that write all of their operand again. A bitcast costs nothing; a scatter or an
update of a donated array happens in place."""
COLLECTIVES = (
    "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
"""Instructions by which devices send each other something."""
KERNELS = ("tpu_custom_call", "mosaic_gpu", "mosaic_gpu_v2")
"""Custom calls that are Pallas kernels."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a program's text."""

    name: str
    opcode: str
    shape: tuple[int, ...]
    """Of the first array that it gives."""
    target: str
    """Of a custom call; empty otherwise."""
    on_chip: bool = False
    """Whether what it gives lies in the chip's own memory (a TPU's VMEM)."""


def instructions(text: str) -> Iterator[Instruction]:
    """All instructions of a program, those inside fusions too."""
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        name, kind, opcode = found.groups()
        shapes = _SHAPE.search(kind)
        sizes = shapes.group(1) if shapes else ""
        target = _TARGET.search(line) if opcode == "custom-call" else None
        yield Instruction(
            name,
            opcode,
            tuple(int(size) for size in sizes.split(",") if size),
            target.group(1) if target else "",
            "S(1)" in kind.partition("}")[0],
        )


def copies_of(text: str, shapes: Sequence[tuple[int, ...]]) -> list[Instruction]:
    """Instructions that copy a whole array of as many elements as one of `shapes`."""
    sizes = {math.prod(shape) for shape in shapes}
    return [
        found
        for found in instructions(text)
        if found.opcode in _COPIES and math.prod(found.shape) in sizes
    ]


def kernels(text: str) -> list[str]:
    """Names of the instructions that run Pallas kernels."""
    return [found.name for found in instructions(text) if found.target in KERNELS]


def collectives(text: str) -> dict[str, int]:
    """How often each collective stands in a program; what starts one and is done with it later
    counts once."""
    found: dict[str, int] = {}
    for one in instructions(text):
        name = one.opcode.removesuffix("-start")
        if name in COLLECTIVES:
            found[name] = found.get(name, 0) + 1
    return found


def optimal_seconds(text: str, said: float | None) -> float | None:
    """XLA's estimate of a TPU program, without the second that it takes off for each bookkeeping
    call; None where it has none. Kernels that declare no cost count for nothing."""
    if said is None:
        return None
    free = sum(1 for found in instructions(text) if found.target == "ConcatBitcast")
    seconds = said + free
    return seconds if seconds >= 0 else None
