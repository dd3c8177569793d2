"""Places: maps a URL to the storage of segments, with TensorStore's settings for reads."""

from __future__ import annotations

import errno
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import tensorstore as ts

from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import READ_ERRORS, StoreError, StoreUnavailable, as_unavailable
from ckv_jax.storage.place import marker
from ckv_jax.storage.place.disk import DiskTimeout, close_descriptor
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.place.kernel_queue import KernelQueues
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.place.objects import ObjectFiles

if TYPE_CHECKING:
    from ckv_jax.storage.encryption import StoreKey


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


@dataclass(frozen=True, slots=True)
class Place:
    """The storage of a store's segments.

    Attributes:
      files: the place.
      context: TensorStore's settings for it: no cache, bounded concurrency.
      direct: whether reads and writes go past the page cache.
      queues: for reads past TensorStore, too; None where that is not possible.
      disk_timeout: what ends waits for the place.
      key: of an encrypted store.
    """

    files: Files
    context: Any
    direct: bool
    queues: KernelQueues | None
    disk_timeout: DiskTimeout
    key: StoreKey | None = None

    def close(self) -> None:
        """Release everything; may be called twice."""
        self.files.close()
        self.disk_timeout.close()


def open_place(
    url: str | os.PathLike[str],
    config: StoreConfig,
    disk_timeout: DiskTimeout,
    *,
    readonly: bool = False,
) -> Place:
    """The place behind `url`, `readonly` only to look; raises StoreError when it cannot be used."""
    text = os.fspath(url)
    if not text:
        raise ValueError("url: got nothing, expected a folder, file://, s3://, gs:// or memory://")
    path, key = folder_of(text), _key(config)
    if path is not None:
        local = LocalFiles(path, readonly=readonly, key=key)
        direct = _use_direct_io(local.root, config.direct_io)
        context = _context(config, direct=direct)
        _wake(local.root, context, config.wait_s)
        queues = _queues(local.root) if direct else None
        return Place(local, context, direct, queues, disk_timeout, key)
    context = _context(config, direct=False)
    key_check = key.check if key else ""
    files = ObjectFiles(text, context, config, readonly=readonly, key_check=key_check)
    return Place(files, context, False, None, disk_timeout, key)


def _key(config: StoreConfig) -> StoreKey | None:
    if config.encrypt_key_file is None:
        return None
    try:
        from ckv_jax.storage.encryption import StoreKey
    except ImportError as e:
        raise ValueError(
            "the package cryptography is missing; for encryption, run: pip install -e '.[encrypt]'"
        ) from e
    return StoreKey.load(config.encrypt_key_file)


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


def _wake(folder: Path, context: Any, seconds: float) -> None:
    """Ask TensorStore for anything: its threads take 5 ms to start, while the index is opened."""
    spec = {"driver": "file", "path": f"{folder}/"}
    try:
        store = ts.KvStore.open(spec, context=context).result(seconds)
    except READ_ERRORS as e:
        raise StoreUnavailable(f"{folder}: cannot be opened: {e}") from e
    store.read(marker.FILE)


def _queues(folder: Path) -> KernelQueues | None:
    """The kernel's own queues, where they can be had and do what they should."""
    try:
        queues = KernelQueues()
        return queues if queues.works(folder / marker.FILE) else None
    except OSError:
        return None


def _use_direct_io(folder: Path, asked: bool | None) -> bool:
    """Whether to read past the page cache: tried on a real file, with a warning where it fails."""
    if asked is False:
        return False
    probe = folder / marker.FILE
    try:
        close_descriptor(os.open(probe, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # no answer to what was asked
            raise as_unavailable(probe, e) from e
        if asked:
            raise StoreError(
                f"{folder}: no direct I/O on this file system: {e}; expected direct_io=None or "
                "False"
            ) from e
        warnings.warn(
            f"{folder}: the file system refuses direct I/O ({e.strerror}); reads go through the "
            "page cache (set direct_io=False to silence this warning)",
            stacklevel=4,
        )
        return False
    return True
