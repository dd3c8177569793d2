"""Where the package keeps what it can make again: `$XDG_CACHE_HOME/ckv_jax`."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """The user's cache folder for this package; it need not exist yet.

    `XDG_CACHE_HOME` counts only if it is absolute, as its specification says: what is trusted must
    not come out of whatever folder the program is started in.
    """
    said = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (said if said.is_absolute() else Path.home() / ".cache") / "ckv_jax"
