"""Records `ckv chat` with the real model as an animated SVG, and draws a map of its attention.

pip install pyte && python docs/pictures/record.py

The session runs in a terminal of its own, over the handbook that ships with the package, which is
stored first. Waits of more than a second are shown as one second; all else is as it was.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import pyte

from ckv_jax.data import handbook, smollm2

HERE = Path(__file__).resolve().parent
COLUMNS, ROWS = 84, 23
LONGEST = 1.0
"""Seconds that a screen is shown at most."""
LAST = 5.0
"""Seconds of the last screen, before the recording begins again."""
TYPED = (
    "What is the goat called?",
    "/sources",
    "Who is the director?",
    "/budget 1",
    "Who is the cook?",
)
SPINNER = re.compile("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]")
COLOURS = {"brightblack": "#8b95a5", "blue": "#6cb0ff", "green": "#7fd089", "red": "#ff7b72"}

Line = tuple[tuple[str, str], ...]
"""Runs of characters of one colour."""


class Screen(pyte.Screen):
    """A terminal that shows dim text as grey."""

    def select_graphic_rendition(self, *attributes: int, **private: bool) -> None:
        super().select_graphic_rendition(*((90,) if attributes == (2,) else attributes), **private)

    def shown(self) -> tuple[Line, ...]:
        """What is on it, without spaces at the ends of lines."""
        return tuple(self._line(self.buffer[row]) for row in range(ROWS))

    def _line(self, cells: dict[int, pyte.screens.Char]) -> Line:
        found = [cells[column] for column in range(COLUMNS)]
        while found and not found[-1].data.strip():
            found.pop()
        return tuple(
            (colour, "".join(cell.data for cell in run))
            for colour, run in groupby(found, lambda cell: COLOURS.get(cell.fg, "#d5dce7"))
        )


class Session:
    """A program in a terminal, and its screens with the time of each."""

    def __init__(self, command: list[str], shown: str) -> None:
        self._screen = Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.screens: list[tuple[float, tuple[Line, ...]]] = []
        self._feed(b"$ ")
        for letter in shown:
            self._feed(letter.encode(), after=0.04)
        self._feed(b"\r\n", after=0.5)
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.execvpe(command[0], command, {
                **os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS),
                "LINES": str(ROWS), "JAX_PLATFORMS": "cpu",
            })  # fmt: skip

    def type(self, line: str) -> None:
        """Waits for a prompt, types a line, and waits until it has an answer."""
        self._until_prompt()
        self._pause(0.8)
        for letter in line:
            os.write(self._terminal, letter.encode())
            self._pause(0.05)
        self._pause(0.3)
        os.write(self._terminal, b"\n")
        self._pause(0.2)

    def end(self) -> None:
        """Waits for the prompt after the last answer, and ends the program."""
        self._until_prompt()
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)

    def _until_prompt(self) -> None:
        for _ in range(200):
            self._pause(0.5)
            if self._screen.display[self._screen.cursor.y].rstrip() == ">":
                return
        raise TimeoutError(f"got no prompt for 100 s: {self._screen.display}")

    def _pause(self, seconds: float) -> None:
        """Takes what the program prints meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                self._feed(os.read(self._terminal, 65536))

    def _feed(self, data: bytes, after: float = 0.0) -> None:
        time.sleep(after)
        self._stream.feed(data)
        self.screens.append((time.monotonic(), self._screen.shown()))


def timed(screens: list[tuple[float, tuple[Line, ...]]]) -> list[tuple[float, tuple[Line, ...]]]:
    """Each screen that differs from the one before, a spinner's turns apart, and when it begins.

    The last entry is the end.
    """
    kept: list[tuple[float, tuple[Line, ...]]] = []
    for at, lines in screens:
        still = tuple(tuple((c, SPINNER.sub("⠿", text)) for c, text in line) for line in lines)
        if not kept or kept[-1][1] != still:
            kept.append((at, still))
    begin, result = 0.0, []
    for (at, lines), (then, _) in pairwise([*kept, (kept[-1][0] + LAST, ())]):
        result.append((begin, lines))
        begin += LAST if lines is kept[-1][1] else min(then - at, LONGEST)
    return [*result, (begin, ())]


def drawn(screens: list[tuple[float, tuple[Line, ...]]]) -> str:
    """An SVG. A line of the terminal is drawn once for the time that it stays the same; without
    animation the last screen shows."""
    whole = screens[-1][0]
    frames, rules = [], []
    for row in range(ROWS):
        spans = [(begin, lines[row]) for begin, lines in screens[:-1]]
        runs = [(next(run)[0], line) for line, run in groupby(spans, lambda span: span[1])]
        for (begin, line), (end, _) in pairwise([*runs, (whole, ())]):
            if not line:
                continue
            name = f"k{len(rules)}"
            shows = "visible" if begin == 0 else "hidden"
            steps = f"0%{{visibility:{shows}}}"
            steps += f"{100 * begin / whole:.2f}%{{visibility:visible}}" * (begin > 0)
            steps += f"{100 * end / whole:.2f}%{{visibility:hidden}}" * (end < whole)
            rules.append(f"@keyframes {name}{{{steps}}}")
            last = "" if end == whole else ' visibility="hidden"'
            runs_of = "".join(
                f'<tspan fill="{colour}">{escape(text)}</tspan>' for colour, text in line
            )
            frames.append(
                f'<text y="{62 + 19 * row}" style="animation-name:{name}"{last}>{runs_of}</text>'
            )
    width, height = 36 + round(8.43 * COLUMNS), 58 + 19 * ROWS
    dots = "".join(
        f'<circle cx="{22 + 20 * n}" cy="22" r="6" fill="{colour}"/>'
        for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
        "<title>ckv chat in a terminal: questions about a handbook, answers, their sources</title>"
        "<style>text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;"
        f"white-space:pre;animation:{whole:.2f}s step-end infinite}}{''.join(rules)}"
        "@media (prefers-reduced-motion){text{animation:none}}</style>"
        f'<rect width="{width}" height="{height}" rx="10" fill="#14181f"/>{dots}'
        f'<g transform="translate(18)">{"".join(frames)}</g></svg>\n'
    )


def main() -> None:
    """Writes docs/pictures/chat.svg and map.png."""
    model = smollm2.fetch()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "handbook.txt").write_text(handbook.chapters())
        os.chdir(folder)
        ckv = str(Path(sys.executable).with_name("ckv"))
        where = ["--store", "kv"]
        ingest = [ckv, "ingest", str(model), "handbook.txt", "--name", "handbook", *where]
        subprocess.run(ingest, check=True)
        session = Session(
            [ckv, "chat", str(model), "handbook.txt", *where],
            "ckv chat $model handbook.txt --store kv",
        )
        for line in TYPED:
            session.type(line)
        session.end()
        picture = drawn(timed(session.screens))
        for question in (line for line in TYPED if not line.startswith("/")):
            ask = [ckv, "ask", str(model), question, "--prefix", "handbook", *where]
            subprocess.run(ask, check=True)
        inspect = [ckv, "inspect", "kv", "handbook", "--plot", str(HERE / "map.png")]
        subprocess.run(inspect, check=True)
    (HERE / "chat.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
