"""Output of every command: JSON or text on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status

from ckv_jax.cli import exit_on_interrupt

Reporter = Callable[[int, int], None]
"""Called as `report(done, total)`; `total` may change between calls."""


def byte_size(count: float) -> str:
    """Formats a number of bytes: 512 B, 1.5 KiB, 20.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number_of(count: int, noun: str) -> str:
    """Formats a count with its noun: 1 chunk, 2,048 chunks, 2 prefixes."""
    plural = "es" if noun.endswith("x") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def json_line(value: Mapping[str, Any]) -> str:
    """Formats an object as one line of JSON. NaN and infinity are not JSON; they become null."""
    return json.dumps(_without_nan(value), ensure_ascii=False, allow_nan=False) + "\n"


def one_line(error: BaseException) -> str:
    """Formats an error's message as one line, or its type where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


class Terminal:
    """The output of one command. `as_json`: stdout carries JSON and nothing else."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)

    def json(self, value: Mapping[str, Any]) -> None:
        """Prints one object on one line."""
        sys.stdout.write(json_line(value))
        sys.stdout.flush()

    def say(self, text: str, *, wrap: bool = True) -> None:
        """Prints a line for people on stdout, or on stderr where stdout carries JSON.

        `wrap=False` leaves the wrapping of long lines to the terminal, so that they can be copied.
        """
        (self.err if self.as_json else self.out).print(text, markup=False, soft_wrap=not wrap)

    def figures(self, text: str) -> None:
        """Prints a dim line of figures under an answer."""
        self.say(text) if self.as_json else self.out.print(text, style="dim", markup=False)

    def stream(self, waiting: Status) -> Callable[[str], None]:
        """Returns a function that prints an answer piece by piece, without leading white space.

        The spinner `waiting` stops at the first word.
        """
        begun = False

        def show(text: str) -> None:
            nonlocal begun
            text = text if begun else text.lstrip()
            if not text:
                return
            if not begun:
                waiting.stop()
            begun = True
            self.out.out(text, end="")
            self.out.file.flush()

        return show

    def warn(self, text: str) -> None:
        """Prints a warning on stderr, about a fault that does not end the command."""
        self.err.print(f"ckv: {text}", markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, *, estimate: bool = True) -> Iterator[Callable[[str], Reporter]]:
        """Shows progress bars on stderr until the block ends; none where stderr is not a terminal.

        `estimate`: show the estimated time left; else the time that has passed. Estimates are wrong
        where some steps compile, which takes a hundred times as long as a usual step.

        Yields `bar(label)`, which makes a reporter; its bar appears with the first report.
        """
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn() if estimate else TimeElapsedColumn(),
        )
        with Progress(
            *columns, console=self.err, transient=True, disable=not self.err.is_terminal
        ) as bars:

            def bar(label: str) -> Reporter:
                task = bars.add_task(label, total=None, visible=False)
                return lambda done, total: bars.update(
                    task, completed=done, total=total, visible=True
                )

            yield bar

    @contextmanager
    def status(self, label: str) -> Iterator[Status]:
        """Shows a spinner on stderr for work of unknown length; none where it is no terminal."""
        spinner = self.err.status(label)
        with spinner if self.err.is_terminal else nullcontext():
            yield spinner

    @contextmanager
    def loading(self, label: str = "loading JAX and the model") -> Iterator[None]:
        """Shows a spinner while loading, which Ctrl-C ends at any point."""
        with self.status(label) as spinner, exit_on_interrupt(spinner.stop):
            yield


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
