"""Tables of bits: how many each layer's keys and values keep, as a codec's name and as a file.

Layers differ in what rounding costs them, keys more than values (KVTuner §4); with a table each
keeps its own bits. A table is all that its codec is made of, and the codec's name spells it,
`table-88-42-…`: bits of keys and bits of values, a pair of digits for each layer. So a layout that
names the codec says how to read it back, and another table is another layout.

Packs of one store are of one size, that of the layer group that takes most: what the other groups
need less is padded, so that a read stays one block at a place that follows from its number.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ckv_jax.storage.layout import Layout
from ckv_jax.storage.quantised import ALIGN, BITS, Quantised

__all__ = ["TABLES", "bits_named", "fitting", "pairs_of", "read_table", "table"]

Pair = tuple[int, int]
"""Bits of keys, bits of values."""

_NAME = re.compile(r"table(?:-[1-9][1-9])+")
_LARGEST_FILE = 1 << 20


def table(bits: Sequence[Pair]) -> Quantised:
    """The codec of a table, a pair for each layer, or one for all of them. Raises ValueError for
    other bits."""
    name = "-".join(("table", *(f"{keys}{values}" for keys, values in bits)))
    return Quantised(name=name, bits=tuple(bits))


def bits_named(name: str) -> Quantised | None:
    """The codec that a name spells; None if it is no table's. Raises ValueError for bits that
    there are not."""
    if not _NAME.fullmatch(name):
        return None
    return table([(int(pair[0]), int(pair[1])) for pair in name.split("-")[1:]])


def read_table(path: str | Path) -> Quantised:
    """The codec of a table's file: a JSON object with `bits`, a list of [bits of keys, bits of
    values], one for each layer or a single one for all; what else it says is not looked at.

    Raises ValueError for a file that is not one, OSError for one that cannot be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(_LARGEST_FILE + 1)
    try:
        if len(data) > _LARGEST_FILE:
            raise ValueError(f"it has more than {_LARGEST_FILE} bytes")
        value: Any = json.loads(data)
        rows = value.get("bits") if isinstance(value, dict) else None
        if not isinstance(rows, list) or not rows:
            raise ValueError('expected an object with "bits", a pair for each layer')
        for layer, row in enumerate(rows):
            pair = row if isinstance(row, list) and len(row) == 2 else [None]
            if any(type(bits) is not int or bits not in BITS for bits in pair):
                raise ValueError(
                    f"layer {layer}: got {str(row)[:40]}, expected bits of keys and of values, "
                    f"each one of {', '.join(map(str, BITS))}"
                )
        return table([(keys, values) for keys, values in rows])
    except (ValueError, RecursionError) as error:  # also of what is not JSON, or not UTF-8
        raise ValueError(f"{path} is not a table of bits: {error}") from error


def pairs_of(layout: Layout) -> list[Pair]:
    """What layers of such a layout can be given: dims that fill whole bytes; keys and values alike
    where they have packs of their own."""
    widths = [bits for bits in BITS if layout.head_dim % (8 // bits) == 0]
    pairs = itertools.product(widths, widths)
    return [(keys, values) for keys, values in pairs if layout.kv_together or keys == values]


def fitting(losses: np.ndarray, layout: Layout, pack_bytes: int) -> tuple[list[Pair], float]:
    """The table of the least loss whose packs have at most so many bytes, and that loss.

    As all packs are of one size, each layer group has the whole of it to itself, whatever the
    others take: what is best for each is best for all, and so few tables of one group are there
    that all of them are looked at. Of equal losses the one of fewer bytes is taken.

    Args:
      losses: [L, P], what each of `pairs_of(layout)` costs each layer; they add up.
      layout: of the packs as they are computed.
      pack_bytes: of one encoded pack.

    Raises:
      ValueError: not even the fewest bits fit.
    """
    pairs = pairs_of(layout)
    sizes = np.array([_layer_bytes(layout, pair) for pair in pairs])
    room = pack_bytes // ALIGN * ALIGN
    chosen: list[Pair] = []
    total = 0.0
    for first in range(0, layout.num_layers, layout.pack_layers):
        mine = losses[first : first + layout.pack_layers]
        every = np.array(list(itertools.product(range(len(pairs)), repeat=len(mine))))
        padded = [*range(len(mine)), *[-1] * (layout.pack_layers - len(mine))]
        taken = sizes[every[:, padded]].sum(1)  # layers that are not there are as the last one
        lost = mine[np.arange(len(mine)), every].sum(1)
        lost[taken > room] = np.inf
        best = np.lexsort((taken, lost))[0]
        if lost[best] == np.inf:
            raise ValueError(
                f"got room for packs of {pack_bytes} bytes, expected at least the "
                f"{-(-taken.min() // ALIGN) * ALIGN} of {min(pairs)} bits everywhere"
            )
        chosen += [pairs[option] for option in every[best]]
        total += float(lost[best])
    return chosen, total


def _layer_bytes(layout: Layout, pair: Pair) -> int:
    """What one layer takes of a pack, of both kinds or, where they are apart, of one."""
    rows = layout.chunk_tokens * layout.num_kv_heads
    kinds = pair[: layout.pack_shape[1]]
    return sum(rows * (4 + layout.head_dim * bits // 8) for bits in kinds)


def _kvtuner() -> Quantised:
    """KVTuner's table for Qwen2.5-7B, quantised per token, 4.0 bits on average."""
    bits = [(4, 4)] * 28
    bits[0] = (8, 8)
    for layer in (3, 13, 27):
        bits[layer] = (8, 2)
    for layer in (1, 2, 4, 5, 8, 24, 25):
        bits[layer] = (4, 2)
    return table(bits)


TABLES: Mapping[str, Quantised] = MappingProxyType({"kvtuner-qwen2.5-7b": _kvtuner()})
"""Published tables by name."""
