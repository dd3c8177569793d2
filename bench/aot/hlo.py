"""What a compiled program's text says: copies of the pool, kernels, XLA's own bookkeeping."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
