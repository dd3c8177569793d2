"""One program to compile: caught on its way, as the engine itself would call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.aot.shapes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One function and the shapes it is compiled for."""

    jitted: Callable[..., Any]
    args: tuple[Any, ...]
    named: dict[str, Any]
    kernels: int = 0
    """How many kernels it calls: what a device should run by a kernel of ours."""
    tokens: int
    """New tokens that it computes, all rows together."""
    room: int = 0
    """Bytes of temporary arrays that its own arithmetic needs beside those of a layer."""
    big: tuple[tuple[int, ...], ...] = ()
    """Shapes of arrays that must never be copied: the pool, and what is donated."""
    must_read: int | None = None
    """Of one kernel by itself: bytes that it has to read and write."""
    moves_more: str | None = None
    """Why no kernel could move about that little."""
    spills_more: str | None = None
    """Why no version is better that spills less."""
    whole_model: float = 1.0
    """Donated buffers of the whole model over those of this call."""
    example: Callable[[], tuple[Any, ...]] | None = None
    """Arrays to count its traffic with."""
    sums: int = 0
    """All-reduces of a model that is split: what devices send each other, and nothing else."""
    gathers: str | None = None
    """What they send each other besides, and why."""
    pinned: bool = False
    """The arguments lie in pinned host memory."""


class _Caught(Exception):
    """Carries what was about to run."""


def caught(sizes: Sizes, call: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The jitted function that `call` would run, with its arguments."""

    def watcher(_: str, jitted: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        raise _Caught(jitted, args, named)

    with sizes.layers.programs.watch(watcher):
        try:
            call()
        except _Caught as found:
            jitted, args, named = found.args
            return jitted, args, named
    raise AssertionError("the caller ran nothing")


def of(sizes: Sizes, call: Callable[[], Any], **facts: Any) -> Program:
    jitted, args, named = caught(sizes, call)
    return Program(jitted=jitted, args=args, named=named, **facts)
