"""`ckv inspect`, `verify`, `prune` and `pin`: looking after a store. None of them loads JAX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ckv_jax.cli.options import Json

__all__ = ["inspect", "parse_size", "pin", "prune", "verify"]

_StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="The store: a folder or a URL.")
]
_UNITS = {
    "": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
    "t": 10**12, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def inspect(
    store: _StoreArgument,
    prefix: Annotated[
        str | None, typer.Argument(metavar="[PREFIX]", help="An id, or how it begins.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", help="Draw the importance of the prefix's chunks."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show which prefixes a store holds, and how; for one of them, statistics of its KV."""


def verify(
    store: _StoreArgument,
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged, rebuild the index.")
    ] = False,
    json: Json = False,
) -> None:
    """Read everything in a store back and check it. Exit code 1 if something is damaged."""


def prune(
    store: _StoreArgument,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", metavar="SIZE", help="What may stay: 50GB, 10GiB, 0 …")
    ],
    json: Json = False,
) -> None:
    """Remove whole segments, least valuable first, until the store is small enough.

    Pinned prefixes and those in use stay.
    """


def pin(
    store: _StoreArgument,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="An id, or how it begins.")],
    unpin: Annotated[bool, typer.Option("--unpin", help="Allow eviction again.")] = False,
    json: Json = False,
) -> None:
    """Keep a prefix: it is never evicted or pruned until unpinned."""


def parse_size(text: str) -> int:
    """Bytes in `50GB`, `1.5 GiB` or `1000`. `ValueError` for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"got {text!r}, expected a size such as 1000, 50GB or 10GiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])
