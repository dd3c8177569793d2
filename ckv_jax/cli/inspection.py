"""How `ckv inspect` shows a store to people: a tree of segments, a table of layers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from ckv_jax.cli.output import Terminal, byte_size, number_of

if TYPE_CHECKING:
    from ckv_jax.storage.tools.inspect import Inspection, PrefixInfo, SegmentInfo

__all__ = ["show_inspection"]

_MOST_UNUSABLE = 5  # segments that are named
_BLOCKS = " ▁▂▃▄▅▆▇█"


def show_inspection(terminal: Terminal, found: Inspection) -> None:
    """The store as a tree: what hangs below a segment continues it."""
    bound = "" if found.max_bytes is None else f" of {byte_size(found.max_bytes)}"
    tree = Tree(
        f"{_count(found.prefixes, 'prefix', 'prefixes')}, "
        f"{_count(found.segments, 'segment', 'segments')}, "
        f"{byte_size(found.bytes)}{bound}"
    )
    roots = [(tree, segment) for segment in reversed(found.children(None))]
    while roots:
        branch, segment = roots.pop()
        node = branch.add(_describe(segment, leaf=segment.prefix_id in found.prefixes))
        roots += [(node, child) for child in reversed(found.children(segment.id))]
    terminal.out.print(tree)
    for reason in list(found.unusable.values())[:_MOST_UNUSABLE]:
        terminal.warn(reason)
    if len(found.unusable) > _MOST_UNUSABLE:
        terminal.warn(f"and {len(found.unusable) - _MOST_UNUSABLE} more; `ckv verify` lists all")
    if found.prefix is not None:
        _show_prefix(terminal, found.prefix)


def _describe(segment: SegmentInfo, *, leaf: bool) -> str:
    layout = segment.layout
    kind = f"{layout['dtype']}, {layout['chunk_tokens']}-token chunks, probe {layout['probe']}"
    if layout["digest"] != "none":
        kind += f", digest {layout['digest']}"
    if layout.get("grouping") == "alike":
        kind += ", chunks of alike tokens"
    if "codec" in layout:
        kind += f", codec {layout['codec']}"
    notes = [
        "pinned" if segment.pinned else "",
        "salted" if segment.salted else "",
        f"score {segment.score:.3g}" if segment.score is not None else "",
        f"only {segment.usable_chunks} of {segment.chunks} chunks can be served"
        if segment.usable_chunks < segment.chunks
        else "",
    ]
    about = " ".join(
        part
        for part in (
            escape(segment.name),
            f"“{escape(segment.begins)}”" if segment.begins else "",
            f"from {escape(segment.source)}" if segment.source else "",
            f"on {time.strftime('%Y-%m-%d %H:%M', time.localtime(segment.created))}",
        )
        if part
    )
    first = segment.first_chunk * layout["chunk_tokens"]
    return ", ".join(
        part
        for part in (
            f"{'[bold]' if leaf else ''}{segment.prefix_id}{'[/bold]' if leaf else ''}",
            about,
            f"{number_of(segment.tokens, 'token')} from {first:,}",
            byte_size(segment.bytes),
            kind,
            *notes,
        )
        if part
    )


def _show_prefix(terminal: Terminal, prefix: PrefixInfo) -> None:
    tokens, chunks = number_of(prefix.num_tokens, "token"), number_of(prefix.num_chunks, "chunk")
    terminal.say(f"\n{prefix.id}: {tokens} in {chunks}")
    if prefix.bad_packs:
        terminal.warn(f"{number_of(prefix.bad_packs, 'pack')} could not be read")
    if prefix.lost_orders:
        segments = number_of(prefix.lost_orders, "segment")
        terminal.warn(f"which tokens are in which pack is damaged in {segments}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("layer", "keys from", "to", "mean size", "values from", "to", "mean size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("NaN, infinite", justify="right")
    for layer in prefix.layers:
        numbers = (
            layer.key_min, layer.key_max, layer.key_mean_abs,
            layer.value_min, layer.value_max, layer.value_mean_abs,
        )  # fmt: skip
        table.add_row(
            str(layer.layer),
            *(f"{n:.3g}" for n in numbers),
            f"{layer.nan}, {layer.infinite}",
        )
    terminal.out.print(table)
    if prefix.importance is not None:
        terminal.say(f"importance of chunks  {_sparkline(prefix.importance)}")


def _sparkline(values: Sequence[float], width: int = 56) -> str:
    """The largest value of each of `width` stretches, as a row of blocks."""
    step = max(1, math.ceil(len(values) / width))
    peaks = [max(values[i : i + step]) for i in range(0, len(values), step)]
    top = max(peaks, default=0.0)
    return "".join(_BLOCKS[round(8 * peak / top)] if top > 0 else " " for peak in peaks)


def _count(things: Sized, one: str, many: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else many}"
