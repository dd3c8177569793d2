"""The heads that score chunks, as files and stored prefixes name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckv_jax.config import Heads, SystemConfig, scoring_layers
from ckv_jax.storage.layout import Layout

__all__ = ["heads_for", "heads_of", "read_heads"]


def read_heads(path: str | Path) -> Heads:
    """What `ckv heads profile` wrote. Raises ValueError for anything else, OSError where there is
    nothing to read."""
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))["heads"]
        pairs = tuple((layer, head) for layer, head in found)
        if not pairs or any(type(number) is not int for pair in pairs for number in pair):
            raise ValueError("pairs of whole numbers")
        return pairs
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: got no list of heads, expected a file of `ckv heads profile`: {error!r}"
        ) from None


def heads_of(layout: Layout) -> Heads:
    """Which heads score what lies like this; () where all do."""
    return tuple(zip(layout.digest_layers, layout.digest_heads, strict=False))


def heads_for(system: SystemConfig, layout: Layout) -> Heads:
    """Those heads, if a system with them could have stored what lies like this; else ()."""
    heads, size = heads_of(layout), system.period
    periods = [range(first, first + size) for first in range(0, layout.num_layers, size)]
    scored = system.digest == layout.digest and all(scoring_layers(p, 1, heads) for p in periods)
    return heads if scored and not system.heads_apart else ()
