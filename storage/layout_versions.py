"""The versions of the format: which fields a layout's JSON has. Older stores stay as they are.

A layout is written as the oldest version that can say what it is: its id, and that of every prefix
stored in it, does not change when the format grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

VERSION = 2
"""Version of the on-disk format; part of every fingerprint of a layout."""
CODED_VERSION = 3
"""Of layouts with a codec: what knows none leaves their segments alone."""
LANDMARKS_VERSION = 4
"""Of layouts whose digest has one landmark for each chunk: likewise."""
PROBE_VERSION = 5
"""Of layouts whose probe has another width than `PROBE_HEADS`: likewise."""
LONG_CODEC_VERSION = 6
"""Of layouts whose codec has a long name: likewise."""
ORDERS_VERSION = 7
"""Of layouts whose segments have an order of their tokens for each layer: likewise."""
HEADS_VERSION = 8
"""Of layouts whose digest has one head of each of its layers, which are read no more; those that
came after it have `HEADS` nevertheless, so that the ids of what is stored stay."""
HEADS = "digest_heads"
"""The field that named those heads: empty in all that is written and read."""
APART_VERSION = 9
"""Of layouts whose packs hold one KV head each: likewise."""
ALIKE_VERSION = 10
"""Of layouts whose chunks are of alike tokens: likewise."""
BESIDE_VERSION = 11
"""Of layouts whose digest has something beside the mean key of each chunk: likewise."""
PQ_VERSION = 12
"""Of layouts whose digest has product-quantised keys of two halves; those of eight values each are
read no more."""
VERSIONS = tuple(range(VERSION, PQ_VERSION + 1))
PLAIN = "none"
"""The codec of packs that lie on disk as they are in memory."""

LANDMARKS = ("means", "bounds", "means+cosines")
"""Digests that keep a landmark for each chunk, not for each token."""
PROBE_HEADS = 3  # IMPRESS §4.3: the keys of three heads rank the tokens of all of them
_SHORT_CODEC = 64  # letters of a codec's name in older versions

_Needs = Callable[[Mapping[str, Any]], bool]
_STEPS: tuple[tuple[int, tuple[str, ...], _Needs], ...] = (
    (PQ_VERSION, (), lambda layout: layout["digest"] == "pq"),
    (BESIDE_VERSION, (), lambda layout: layout["digest"] == "means+cosines"),
    (ALIKE_VERSION, ("grouping",), lambda layout: layout["grouping"] != "position"),
    (APART_VERSION, ("heads_apart",), lambda layout: layout["heads_apart"]),
    (HEADS_VERSION, (HEADS,), lambda _: False),
    (ORDERS_VERSION, ("layer_orders",), lambda layout: layout["layer_orders"]),
    (LONG_CODEC_VERSION, (), lambda layout: len(layout["codec"].partition(":")[0]) > _SHORT_CODEC),
    (PROBE_VERSION, ("probe_width",), lambda layout: layout["probe_width"] != PROBE_HEADS),
    (LANDMARKS_VERSION, (), lambda layout: layout["digest"] in LANDMARKS),
    (CODED_VERSION, ("codec", "codec_bytes"), lambda layout: layout["codec"] != PLAIN),
)
"""Newest first: a version, the fields that those before it do not have, and what needs it."""


def versioned(layout: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a layout, as the oldest version that has what it needs writes them."""
    values: dict[str, Any] = {**layout, HEADS: []}
    for version, since, needs in _STEPS:
        if needs(layout):
            return {"version": version, **values}
        for name in since:
            del values[name]
    return {"version": VERSION, **values}


def fields_of(value: Any, names: set[str]) -> dict[str, Any]:
    """What `versioned` was given, of fields `names`; those that the version lacks are left out.

    Raises ValueError for anything else.
    """
    if not isinstance(value, dict) or value.get("version") not in VERSIONS:
        raise ValueError(f"layout: got {str(value)[:80]}, expected version {VERSION}")
    later = [name for version, since, _ in _STEPS if value["version"] < version for name in since]
    names = {*names, HEADS} - set(later)
    if set(value) - {"version"} != names:
        raise ValueError(f"layout: got fields {sorted(value)[:20]}, expected {sorted(names)}")
    if value["digest"] == "pq" and value["version"] < PQ_VERSION:
        raise ValueError(f"layout: got a pq digest of version {value['version']}, which is gone")
    if value.get(HEADS, []) != []:
        raise ValueError(f"layout: got {HEADS}={str(value[HEADS])[:80]}, expected none")
    return {name: value[name] for name in names - {HEADS}}
