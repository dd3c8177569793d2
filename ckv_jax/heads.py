"""The heads that score chunks, as files and stored prefixes name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckv_jax.config import Heads
from ckv_jax.storage.layout import Layout

__all__ = ["heads_of", "read_heads"]


def read_heads(path: str | Path) -> Heads:
    """What `ckv heads profile` wrote. Raises ValueError for anything else, OSError where there is
    nothing to read."""
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))["heads"]
        return tuple((int(layer), int(head)) for layer, head in found)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: got no list of heads, expected a file of `ckv heads profile`: {error!r}"
        ) from None


def heads_of(layout: Layout) -> Heads:
    """Which heads score what lies like this; () where all do."""
    return tuple(zip(layout.digest_layers, layout.digest_heads, strict=False))
