"""The host pool of loaded digests: least recently used go first, within a byte budget."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from ckv_jax.storage.digest.data import DigestData


class DigestPool:
    """Digests by prefix; thread-safe. One that is larger than the whole budget is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, DigestData] = OrderedDict()
        self.bytes = 0
        """Bytes of everything kept."""

    def get(self, key: Hashable, load: Callable[[], DigestData | None]) -> DigestData | None:
        """The digest of `key`, loaded if need be; two threads may load the same one at once."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        loaded = load()
        if loaded is not None and loaded.nbytes <= self._max_bytes:
            with self._lock:
                if key not in self._kept:
                    self._kept[key] = loaded
                    self.bytes += loaded.nbytes
                while self.bytes > self._max_bytes:
                    self.bytes -= self._kept.popitem(last=False)[1].nbytes
        return loaded

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0
