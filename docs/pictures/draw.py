"""Draws pictures of the README and of docs/concepts.md; `milliseconds` from `bench.ttft`'s result.

python docs/pictures/draw.py

They follow the reader's light or dark setting, and have a ground of their own.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
STYLE = """
.ground { fill: #ffffff } .box { fill: #f2f4f8; stroke: #8a94a6; stroke-width: 1.2 }
.disk { fill: #e6effa; stroke: #3f6fb0; stroke-width: 1.2 } .chunk { fill: #c9d3e2 }
.hit { fill: #2f7fd8 } .title { fill: #10233f; font-weight: 600 } .text { fill: #27303f }
.small { fill: #515c6e; font-size: 12.5px } .line { stroke: #515c6e; stroke-width: 1.6; fill: none }
.tip { fill: #515c6e } .select { fill: #2f7fd8 } .wait { fill: #d98a29 }
.compute { fill: #3d9a63 } .host { fill: #9aa5b5 }
@media (prefers-color-scheme: dark) {
.ground { fill: #14181f } .box { fill: #232a35; stroke: #7d8798 }
.disk { fill: #1b2c44; stroke: #6f9fdc } .chunk { fill: #46536a } .hit { fill: #6cb0ff }
.title { fill: #e9eef6 } .text { fill: #d5dce7 } .small { fill: #a9b4c5 }
.line { stroke: #a9b4c5 } .tip { fill: #a9b4c5 } .select { fill: #6cb0ff } .wait { fill: #f0ad55 }
.compute { fill: #6fc492 } .host { fill: #5b6678 } }
"""
STAGES = {
    "select": ("select", ("select",)),
    "wait for the disk": ("wait", ("probe_io", "critical_io_wait")),
    "compute": ("compute", ("compute",)),
    "the rest, on the host": ("host", ("open", "submit", "dispatch", "book", "other")),
}
"""What a bar's piece is called: its style, and the entries of `breakdown_ms` that it sums."""


class Drawing:
    """SVG elements on a ground of `width` x `height` pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, *lines: str, style: str = "box") -> None:
        """A box with its lines of text in the middle, the first one as a title."""
        self._parts.append(
            f'<rect class="{style}" x="{x}" y="{y}" width="{w}" height="{h}" rx="8"/>'
        )
        for n, line in enumerate(lines):
            top = y + h / 2 + 5 + 18 * (n - (len(lines) - 1) / 2)
            self.text(x + w / 2, top, line, "title" if n == 0 else "small", middle=True)

    def bar(self, x: float, y: float, width: float, style: str) -> None:
        """A piece of a bar."""
        self._parts.append(
            f'<rect class="{style}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="20"/>'
        )

    def text(
        self, x: float, y: float, line: str, style: str = "text", *, middle: bool = False
    ) -> None:
        """One line; `y` is its base line."""
        anchor = ' text-anchor="middle"' if middle else ""
        self._parts.append(
            f'<text class="{style}" x="{x:g}" y="{y:g}"{anchor}>{escape(line)}</text>'
        )

    def arrow(self, *points: tuple[int, int]) -> None:
        """A line through points, with a tip at its end."""
        path = " L ".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="line" d="M {path}" marker-end="url(#tip)"/>')

    def chunks(self, x: int, y: int, count: int, hits: set[int], *, columns: int) -> None:
        """Small squares, those in `hits` in another colour."""
        for n in range(count):
            style = "hit" if n in hits else "chunk"
            left, top = x + 13 * (n % columns), y + 13 * (n // columns)
            self._parts.append(
                f'<rect class="{style}" x="{left}" y="{top}" width="10" height="10" rx="2"/>'
            )

    def save(self, name: str) -> None:
        """Writes the picture beside this file."""
        width, height = self._size
        (HERE / name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="15">\n'
            f"<title>{escape(self._title)}</title><style>{STYLE}</style>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            '<path class="tip" d="M 0 0 L 8 4 L 0 8 z"/>'
            "</marker></defs>\n"
            f'<rect class="ground" width="{width}" height="{height}" rx="10"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n",
            encoding="utf-8",
        )


def overview() -> None:
    """A text is computed once; each question reads a part."""
    picture = Drawing(860, 320, "A text is computed once; each question reads the part it needs")
    hits = {3, 4, 17, 29, 30, 31, 52, 66}
    picture.text(30, 40, "Once for each text", "title")
    picture.box(30, 60, 150, 64, "your document", "5,000 tokens")
    picture.arrow((180, 92), (228, 92))
    picture.box(230, 60, 150, 64, "the model", "runs over all of it")
    picture.arrow((380, 92), (428, 92))
    picture.box(430, 60, 400, 150, style="disk")
    picture.text(450, 86, "its KV cache on SSD, in chunks of 8 tokens", "title")
    picture.chunks(450, 100, 84, hits, columns=28)
    picture.text(450, 162, "each chunk has a checksum", "small")
    picture.text(450, 180, "a small copy of the keys, the digest, stays in memory", "small")
    picture.text(450, 198, "it survives restarts, and processes share it", "small")
    picture.text(30, 210, "For each question", "title")
    picture.box(30, 230, 150, 64, "a question", "“the goat’s name?”")
    picture.arrow((180, 262), (228, 262))
    picture.box(230, 230, 150, 64, "score chunks", "by the digest")
    picture.arrow((380, 262), (428, 262))
    picture.box(430, 230, 170, 64, "read the best", "5 to 25% of the text")
    picture.arrow((515, 210), (515, 228))
    picture.arrow((600, 262), (648, 262))
    picture.box(650, 230, 180, 64, "“Parallax.”", "and its sources")
    picture.save("overview.svg")


def request() -> None:
    """The path of one request, period by period."""
    picture = Drawing(860, 470, "The path of a request: select, demand, compute, period by period")
    picture.box(30, 24, 190, 48, "a question", "tokens")
    picture.arrow((125, 72), (125, 104))
    picture.box(30, 106, 190, 56, "stored prefix", "the longest in the index")
    picture.box(30, 196, 400, 190)
    picture.text(50, 222, "for each period: the layers of one selection", "title")
    picture.arrow((125, 162), (125, 194))
    picture.box(50, 236, 170, 60, "score the chunks", "queries × digest")
    picture.arrow((220, 266), (244, 266))
    picture.box(246, 236, 164, 60, "select the best", "budget × chunks")
    picture.box(50, 314, 360, 58, "run the layers", "attend to selected chunks and the question")
    picture.arrow((410, 266), (478, 266))
    picture.text(434, 250, "ids", "small")
    picture.box(480, 226, 160, 80, "find the packs", "device · host · SSD")
    picture.arrow((560, 306), (560, 342), (412, 342))
    picture.text(470, 360, "device slots", "small")
    picture.box(480, 24, 350, 138, style="disk")
    picture.text(500, 50, "the store on SSD", "title")
    picture.text(500, 74, "a pack: K and V of one chunk, 1 to 4 layers", "small")
    picture.text(500, 94, "one read brings one pack, under one checksum", "small")
    picture.text(500, 114, "a pack that cannot be read is computed again", "small")
    picture.chunks(500, 130, 24, {2, 3, 9, 15, 16}, columns=24)
    picture.arrow((735, 162), (735, 224))
    picture.text(745, 198, "packs", "small")
    picture.box(660, 226, 170, 80, "caches", "device, then host")
    picture.arrow((660, 266), (642, 266))
    picture.arrow((125, 386), (125, 414))
    picture.box(30, 416, 190, 40, "first token")
    picture.arrow((220, 436), (478, 436))
    picture.box(
        480, 406, 350, 56, "then: note what was used", "the cache policy decides what stays"
    )
    picture.arrow((745, 406), (745, 308))
    picture.save("request.svg")


def milliseconds() -> None:
    """The stages of a cold first token, one bar a system."""
    results = HERE.parents[1] / "bench" / "results" / "ttft.json"
    rows = [
        row
        for row in json.loads(results.read_text("utf-8"))["rows"]
        if (row["variant"], row["budget"]) == ("default", 0.05) and row["system"] != "recompute"
    ]
    rows.sort(key=lambda row: float(row["ttft_ms"]["mean"]))
    picture = Drawing(860, 90 + 34 * len(rows), "Where the milliseconds of a first token go")
    picture.text(30, 36, "Where the milliseconds of a cold first token go, at 5%", "title")
    scale = 600 / max(sum(row["breakdown_ms"].values()) for row in rows)
    for n, row in enumerate(rows):
        x, y = 160.0, 56 + 34 * n
        picture.text(30, y + 15, row["system"])
        for style, entries in STAGES.values():
            width = scale * sum(row["breakdown_ms"][entry] for entry in entries)
            picture.bar(x, y, width, style)
            x += width
        picture.text(x + 8, y + 15, f"{row['ttft_ms']['mean']:.0f} ms", "small")
    x = 160
    for name, (style, _) in STAGES.items():
        picture.bar(x, 60 + 34 * len(rows), 20, style)
        picture.text(x + 28, 75 + 34 * len(rows), name, "small")
        x += 56 + 7 * len(name)
    picture.save("milliseconds.svg")


PICTURES = (overview, request, milliseconds)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
