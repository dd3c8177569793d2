"""From a URL to where segments live, and TensorStore's settings for reading there."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tensorstore as ts

from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.files import Files
from ckv_jax.storage.local import LocalFiles


def open_place(url: str | os.PathLike[str], config: StoreConfig) -> tuple[Files, Any]:
    """The files behind `url`, and a `ts.Context` of our own: no cache, bounded concurrency."""
    text = os.fspath(url)
    parts = urlsplit(text) if "://" in text else None
    if parts is None or parts.scheme == "file":
        path = Path(unquote(parts.path) if parts else text)
        if parts and parts.netloc not in ("", "localhost"):
            raise ValueError(f"url: got {text!r}, expected file:///path")
        local = LocalFiles(path)
        return local, _context(config, direct=_use_direct_io(local.root, config.direct_io))
    raise ValueError(f"url: got {text!r}, expected a folder, file://, s3://, gs:// or memory://")


def _context(config: StoreConfig, *, direct: bool) -> Any:
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": max(2, min(8, os.cpu_count() or 2))},
            "file_io_concurrency": {"limit": config.io_concurrency},
            "file_io_mode": {"mode": "direct" if direct else "default"},
            "s3_request_concurrency": {"limit": config.io_concurrency},
            "gcs_request_concurrency": {"limit": config.io_concurrency},
        }
    )


def _use_direct_io(folder: Path, wish: bool | None) -> bool:
    """Whether to read past the page cache: tried on a real file, with a warning where it fails."""
    if wish is False:
        return False
    probe = folder / "store.json"
    try:
        os.close(os.open(probe, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as e:
        if wish:
            raise StoreError(f"{folder}: no direct I/O here: {e}") from e
        warnings.warn(
            f"{folder}: the file system refuses direct I/O ({e.strerror}); reads go through the "
            "page cache (direct_io=False says so without this warning)",
            stacklevel=4,
        )
        return False
    return True
