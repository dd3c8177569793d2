"""Where the package keeps what it can make again: `$XDG_CACHE_HOME/ckv_jax`."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """The user's cache folder for this package; it need not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ckv_jax"
