"""What a URL of a store says: a folder here, or something else."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit


def folder_of(url: str | os.PathLike[str]) -> Path | None:
    """The folder that a path or a file:// URL names; None for any other URL.

    Raises ValueError for a file:// URL that names another machine.
    """
    text = os.fspath(url)
    if "://" not in text:
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"url: got {text!r}, expected file:///path")
    return Path(unquote(parts.path))
