"""What a user may set on a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX

from ckv_jax.storage import chain


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Limits and I/O settings of one open store; none but the key changes what is on disk.

    Attributes:
      max_bytes: bound on the bytes on disk; None: no bound but the disk's.
      tenant_bytes: bound on the bytes of each tenant, the one without a salt included.
      quotas: bounds of single tenants, by salt, in place of `tenant_bytes`.
      io_concurrency: TensorStore's reads in flight at once.
      direct_io: read past the page cache; None: where the file system allows it, else warn.
      deadline_s: a read that takes longer is abandoned with `ReadTimeout`.
      wait_s: a lock, an open, a manifest or a request of the index that gets no further for so long
        is given up with `StoreUnavailable`.
      write_s: the same for writes, fsyncs and the publishing of a segment.
      eviction: which whole segments go first: least "attention" (importance x frequency), or "lru".
      encrypt_key_file: has the store's key, 64 hexadecimal digits: an empty place becomes an
        encrypted store, and an encrypted one opens with its key alone. None: in clear.
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
                raise ValueError(f"{name}: got {bound}, expected None or at least 0")
        for salt, bound in self.quotas.items():
            chain.check_salt(salt)
            if bound < 0:
                raise ValueError(f"quotas: got {bound}, expected at least 0")
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
        """The bound of one tenant, by its mark; None: no bound of its own."""
        own = {chain.tenant_mark(salt): bound for salt, bound in self.quotas.items()}
        return own.get(mark, self.tenant_bytes)
