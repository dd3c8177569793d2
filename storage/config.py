"""Configuration of a store: `StoreConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX

from ckv_jax.storage import chain


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Limits and I/O settings of one open store. Only the key changes the data on disk.

    Raises `ValueError` for a value out of range.

    Attributes:
      max_bytes: size limit of the store, in bytes on disk; None: the size of the disk.
      tenant_bytes: size limit of each tenant, in bytes; prefixes without a salt are one tenant.
      quotas: size limits of single tenants, by salt, in place of `tenant_bytes`.
      io_concurrency: TensorStore's reads in flight at once, 1 to 1024.
      direct_io: True: read with direct I/O, which bypasses the page cache; False: without; None:
        with direct I/O where the file system supports it, else with a warning.
      deadline_s: seconds after which a read is abandoned with `ReadTimeout`.
      wait_s: seconds without progress after which a lock, an open, a manifest or a query of the
        index raises `StoreUnavailable`.
      write_s: the same for writes, fsyncs and the publishing of a segment.
      eviction: which whole segments are evicted first: "attention", the least importance x
        frequency; or "lru", the least recently used.
      encrypt_key_file: file with the store's key, 64 hexadecimal digits. A new store is encrypted
        with it; an encrypted store opens only with its key. None: no encryption.
    """

    max_bytes: int | None = None
    tenant_bytes: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict, hash=False)
    io_concurrency: int = 32
    direct_io: bool | None = None
    deadline_s: float = 10.0
    wait_s: float = 10.0
    write_s: float = 120.0
    eviction: str = "attention"
    encrypt_key_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "tenant_bytes"):
            bound = getattr(self, name)
            if bound is not None and bound < 0:
                raise ValueError(f"{name}: got {bound}, expected None or at least 0 bytes")
        for salt, bound in self.quotas.items():
            chain.check_salt(salt)
            if bound < 0:
                raise ValueError(f"quotas: got {bound}, expected at least 0 bytes")
        if not 1 <= self.io_concurrency <= 1024:
            raise ValueError(f"io_concurrency: got {self.io_concurrency}, expected 1 to 1024")
        for name in ("deadline_s", "wait_s", "write_s"):
            seconds = getattr(self, name)
            if not 0 < seconds <= TIMEOUT_MAX:
                raise ValueError(
                    f"{name}: got {seconds}, expected seconds above 0, at most {TIMEOUT_MAX:.0f}"
                )
        if self.eviction not in ("attention", "lru"):
            raise ValueError(f"eviction: got {self.eviction!r}, expected 'attention' or 'lru'")

    def bound_of(self, mark: str) -> int | None:
        """Returns the size limit of one tenant, by its mark, in bytes; None without a limit."""
        own = {chain.tenant_mark(salt): bound for salt, bound in self.quotas.items()}
        return own.get(mark, self.tenant_bytes)
