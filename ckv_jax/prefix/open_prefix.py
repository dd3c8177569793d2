"""An open prefix: locations of its packs, readers, and its digest on the device."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ckv_jax.buckets import probe_bucket
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.prefetcher import PackReader
from ckv_jax.storage.chain import EXACT
from ckv_jax.storage.layout import PLAIN, Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.reader import PrefixReader

if TYPE_CHECKING:
    from ckv_jax.pipeline.recovery import Recovered
    from ckv_jax.prefix.open_prefixes import OpenPrefixes

_AGAIN_S = 0.1
"""Shortest wait until segments that could not be opened are tried again."""


class Replacement(Protocol):
    """KV that the store could not give, computed again."""

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        """Packs [n, *pack_shape]. Raises `RecoveryNeeded` while they are still to be computed."""


class Source(Protocol):
    """A source of packs: the store, or recomputed KV."""

    @property
    def prefix(self) -> Prefix:
        """The prefix of the packs."""

    @property
    def groups(self) -> int:
        """Number of layer groups."""

    @property
    def first_page(self) -> np.ndarray:
        """int64 [M]: page of (group 0, chunk)."""

    @property
    def page_stride(self) -> np.ndarray:
        """int64 [M]: pages from one group to the next."""

    @property
    def reader(self) -> PackReader:
        """Reads them from the store."""

    @property
    def recovered(self) -> Replacement:
        """Recomputed KV for packs that cannot be read."""

    @property
    def sizes(self) -> np.ndarray | None:
        """int64 [groups, M]: bytes that reading a pack takes; None: as many as its room has."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class OpenPrefix:
    """One prefix that an engine has opened, a `Source` of its packs. Engine thread only.

    It stays known between requests, with tables, latest selections and digest, so that a request
    over what is in memory asks the store nothing. While it is used, pages keep their numbers,
    and its segments stay on disk from the first read on.
    """

    prefix: Prefix
    first_page: np.ndarray
    """int64 [M]: page of (group 0, chunk)."""
    page_stride: np.ndarray
    """int64 [M]: pages from one group to the next."""
    chunk_lengths: np.ndarray
    """int32 [M]: valid tokens of each chunk."""
    life: OpenPrefixes
    """Opens and closes it."""
    latest: dict[int, np.ndarray] = field(default_factory=dict)
    """Period -> chunk ids int [rows, J, n] that each of its J selections has made last; -1:
    none."""
    resident: bool = False
    """Whether all packs that the latest request selected were on the device."""
    digest: Digest | None = None
    """Its probes are padded to `probe_chunks`."""
    room: int = 0
    """Chunks that the probe is to have room for at least."""
    order: np.ndarray | None = None
    """int [L, T]: the position of each token as stored, of a reordered prefix that an executor has
    opened in its order; None: it is read when KV is computed again."""
    always: int | None = None
    """The most chunks that are selected in any case; None: no request has asked yet."""
    sizes: np.ndarray | None = field(init=False, default=None)
    """See `Source`."""
    users: int = 0
    hold_at: float = math.inf
    """When to `hold` again what could not be opened, by `time.monotonic`; infinite: never."""
    _readers: list[PrefixReader] = field(default_factory=list)
    """Those of its users; the last one reads."""
    _began: float = 0.0
    """When the first of them was made, by the monotonic clock."""
    _looks: int = 0
    """How often `share` has looked again for a segment that is gone."""
    _pause_s: float = 0.0
    """The latest wait for `hold_at`."""
    num_chunks: int = field(init=False)
    """M."""

    def __post_init__(self) -> None:
        self.num_chunks, layout = len(self.chunk_lengths), self.prefix.layout
        if layout.short_last:
            each = np.array([[layout.group_bytes(group)] for group in range(layout.groups)])
            self.sizes = np.broadcast_to(each, (layout.groups, self.num_chunks))

    @property
    def probe_chunks(self) -> int:
        """M, rounded up to a bucket."""
        return probe_chunks(max(self.num_chunks, self.room), self.prefix.layout)

    @property
    def digest_bytes(self) -> int:
        """Device bytes of the digest."""
        digest = self.digest  # others ask while the engine's thread lets go of it
        return 0 if digest is None else digest.nbytes

    # -- use --------------------------------------------------------------------------------------

    @property
    def reader(self) -> PrefixReader:
        """Reads its packs, while it is used."""
        if not self._readers:
            if not self.users:
                raise RuntimeError(f"got a read of prefix {self.prefix.id}, which is not in use")
            self._began = time.monotonic()
            self._readers.append(self.life.reader(self.prefix))
        return self._readers[-1]

    def hold(self) -> None:
        """Keeps its segments on disk from now on, not only from the first read on.

        If they cannot be opened, `hold_at` says when to try again. All prefixes wait ten times what
        the try took, so that a disk that hangs stops the engine a tenth of the time. This one also
        waits twice as long as before, so that readers stay few.
        """
        began = time.monotonic()
        self.hold_at = self.life.hold_at if began < self.life.hold_at else math.inf
        if self.hold_at == math.inf and not self.reader.hold():
            now = time.monotonic()
            self.life.hold_at = now + 10 * (now - began)
            self._pause_s = max(_AGAIN_S + 10 * (now - began), 2 * self._pause_s)
            self.hold_at = now + self._pause_s
            self._readers.append(self.life.reader(self.prefix))  # which opens them again

    @property
    def replaceable(self) -> bool:
        """Whether its KV can be computed again as it is stored: from the tokens alone. What a codec
        has stored is other KV."""
        layout = self.prefix.layout
        plain = layout.codec == PLAIN and not (layout.alike or layout.reordered)
        return plain and self.prefix.provenance == EXACT

    @property
    def recovered(self) -> Recovered:
        """Its recomputed KV."""
        return self.life.recomputed(self)

    def share(self) -> OpenPrefix:
        """The same for one more user, who closes it too."""
        self.users += 1
        if self._readers and self._readers[-1].incomplete:  # by now it may be there
            wait_s = 2 * (2**self._looks - 1)  # none at first; then few readers, however long
            if time.monotonic() - self._began >= wait_s:
                self._looks += 1
                self._readers.append(self.life.reader(self.prefix))
        return self

    def close(self) -> None:
        """One user less; the last one lets its segments go."""
        self.users -= 1
        if not self.users:
            self.hold_at, self._pause_s, self._looks = math.inf, 0.0, 0
            for reader in self._readers:
                reader.close()
            self._readers.clear()
        self.life.unused(self)

    @property
    def groups(self) -> int:
        """Its layer groups."""
        return self.prefix.layout.groups

    # -- pages ------------------------------------------------------------------------------------

    def pages(self, group: int | np.ndarray, chunks: np.ndarray) -> np.ndarray:
        """Page numbers (int64) of these chunks of one layer group, or of one each."""
        pages: np.ndarray = self.first_page[chunks] + group * self.page_stride[chunks]
        return pages

    def all_pages(self) -> np.ndarray:
        """Page numbers (int64) of everything that caches may hold of it."""
        every = np.arange(self.num_chunks)
        pages = [self.pages(group, every) for group in range(self.groups)]
        return np.concatenate([*pages, *[more(self) for more in self.life.more_pages]])


def probe_chunks(chunks: int, layout: Layout) -> int:
    """Chunks that a probe of so many has room for: multiples of 1,024 tokens, then coarser."""
    return probe_bucket(chunks, step=max(1, 1024 // layout.chunk_tokens))
