"""What a user may set on a store."""

from __future__ import annotations

from dataclasses import dataclass
from threading import TIMEOUT_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Limits and I/O settings of one open store; nothing here changes what is on disk.

    Attributes:
      max_bytes: bound on the bytes on disk; None: no bound but the disk's.
      io_concurrency: reads in flight at once.
      direct_io: read past the page cache; None: where the file system allows it, else warn.
      deadline_s: a read that takes longer is abandoned with `ReadTimeout`.
      eviction: which whole segments go first: least "attention" (importance x frequency), or "lru".
      digest_bytes: budget of the host pool that keeps loaded digests.
    """

    max_bytes: int | None = None
    io_concurrency: int = 32
    direct_io: bool | None = None
    deadline_s: float = 10.0
    eviction: str = "attention"
    digest_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 0:
            raise ValueError(f"max_bytes: got {self.max_bytes}, expected None or at least 0")
        if not 1 <= self.io_concurrency <= 1024:
            raise ValueError(f"io_concurrency: got {self.io_concurrency}, expected 1 to 1024")
        if not 0 < self.deadline_s <= TIMEOUT_MAX:
            raise ValueError(
                f"deadline_s: got {self.deadline_s}, expected seconds above 0, "
                f"at most {TIMEOUT_MAX:.0f}"
            )
        if self.eviction not in ("attention", "lru"):
            raise ValueError(f"eviction: got {self.eviction!r}, expected 'attention' or 'lru'")
        if self.digest_bytes < 0:
            raise ValueError(f"digest_bytes: got {self.digest_bytes}, expected at least 0")
