"""Which segments can be served, and how far: catalog, manifests and quarantine together."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.errors import (
    SegmentDamaged,
    SegmentForeign,
    StoreClosed,
    StoreError,
    StoreUnavailable,
)
from ckv_jax.storage.index import lookup
from ckv_jax.storage.index.catalog import Catalog, Described
from ckv_jax.storage.index.lookup import Loaded
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.manifest import Manifest, ManifestCache
from ckv_jax.storage.segment.segment import Segment


class Counters:
    """Named counts; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        """Count something."""
        with self._lock:
            self._counts[name] += number

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


class Index:
    """Finds segments and prefixes; thread-safe.

    The catalog proposes, the manifests decide, and chunks that turned out bad are left out.
    """

    def __init__(
        self, files: Files, counts: Counters, *, wait_s: float, readonly: bool = False
    ) -> None:
        self._files = files
        self._counts = counts
        self._lock = threading.Lock()
        self._bad: dict[tuple[str, str], set[int]] = {}  # (segment, checksum) → bad chunks
        self._unread: set[str] = set()
        self._manifests = ManifestCache(files)
        self.catalog = Catalog(
            files.catalog_path,
            self.describe,
            files.segment_ids,
            wait_s=wait_s,
            readonly=readonly,
        )
        self.refresh()

    def refresh(self) -> None:
        """Bring the catalog in line with what is there, as far as that can be read."""
        self.catalog.reconcile()

    @property
    def unread(self) -> bool:
        """Whether there are, or may be, segments that the index lacks."""
        return bool(self._unread) or not self.catalog.listed

    def unknown(self) -> set[str]:
        """Ids of segments that the index lacks, as their manifests cannot be read.

        Raises StoreUnavailable while it cannot even be told which segments there are.
        """
        if self._unread or not self.catalog.listed:
            self._unread.clear()
            self.refresh()
        if not self.catalog.listed:
            raise StoreUnavailable("the folder of segments cannot be read: nothing is evicted")
        return set(self._unread)

    # -- finding ---------------------------------------------------------------------------------

    def longest(
        self,
        tokens: np.ndarray,
        fingerprint: Fingerprint,
        layout: Layout,
        salt: str,
        *,
        provenance: str,
        marked: bool = False,
    ) -> Prefix:
        """The longest prefix of `tokens` int32 [T] that can be served.

        With `marked`, chunks that are marked as bad count as stored.
        """
        found = lookup.longest(
            tokens,
            fingerprint=fingerprint,
            layout=layout,
            salt=salt,
            provenance=provenance,
            catalog=self.catalog,
            load=self.load_marked if marked else self.load,
        )
        self._counts.add("hits" if found.num_tokens else "misses")
        return found

    def prefix(self, prefix_id: str, salt: str | None = None) -> Prefix:
        """The prefix of an id, or of the start of one; raises PrefixNotFound, StoreUnavailable.

        Args:
          prefix_id: hex.
          salt: whose it must be; None: anybody's.
        """
        return lookup.by_id(prefix_id, salt=salt, catalog=self.catalog, load=self.find)

    def prefixes(self, salt: str | None = None) -> list[Prefix]:
        """Every prefix that no other continues, without damaged ones; None: of all tenants."""
        found = []
        whose = None if salt is None else chain.tenant_mark(salt)
        for id_ in self.catalog.leaves(whose):
            loaded = self.load(id_)
            if loaded is None or whose not in (None, loaded.manifest.tenant):
                continue
            with contextlib.suppress(SegmentDamaged):
                found.append(lookup.resolve(loaded, loaded.manifest.chunks, self.load, salt))
        return sorted(found, key=lambda p: p.id)

    # -- segments --------------------------------------------------------------------------------

    def find(self, segment_id: str) -> Loaded | None:
        """A segment's checked manifest and usable chunks; None when it is gone or damaged.

        Raises:
          StoreUnavailable: that cannot be told now.
        """
        try:
            manifest, checksum = self._manifests.load(segment_id)
        except (SegmentDamaged, SegmentForeign):
            return None
        return Loaded(
            manifest, checksum, min(self.marks(manifest, checksum), default=manifest.chunks)
        )

    def load(self, segment_id: str) -> Loaded | None:
        """The same; also None, and counted, when it cannot be told now."""
        try:
            return self.find(segment_id)
        except StoreUnavailable:
            self._counts.add("unread")
            return None

    def load_marked(self, segment_id: str) -> Loaded | None:
        """The same, with marked chunks among the usable."""
        found = self.load(segment_id)
        return found and Loaded(found.manifest, found.checksum, found.manifest.chunks)

    def marks(self, manifest: Manifest, checksum: str) -> set[int]:
        """Chunks of a segment that are marked as bad."""
        with self._lock:
            marks = set(self._bad.get((manifest.segment_id, checksum), ()))
        marks.update(self.catalog.quarantined(manifest.segment_id, checksum))
        return {chunk for chunk in marks if 0 <= chunk < manifest.chunks}

    def marked_chunks(self, prefix: Prefix) -> np.ndarray:
        """int64 [n]: the chunks of a prefix that are marked as bad, ascending."""
        found: list[int] = []
        start = 0
        for span in prefix.spans:
            local = (chunk - span.first_chunk for chunk in self.marked(span))
            found += [start + chunk for chunk in local if 0 <= chunk < span.num_chunks]
            start += span.num_chunks
        return np.sort(np.array(found, np.int64))

    def marked(self, span: Span) -> set[int]:
        """Chunks of a span's whole segment that are marked as bad."""
        loaded = self.load(span.segment_id)
        if loaded is None or loaded.checksum != span.checksum:
            return set()
        return self.marks(loaded.manifest, loaded.checksum)

    def manifest(self, segment_id: str, checksum: str) -> Manifest:
        """The manifest with this checksum; raises SegmentDamaged when it is gone or another."""
        manifest, found = self._manifests.load(segment_id)
        if found != checksum:
            raise SegmentDamaged(f"segment {segment_id}: replaced")
        return manifest

    def describe(self, ids: Iterable[str]) -> Iterator[Described]:
        """Manifest, checksum and size of segments, without those that are damaged or unread."""
        for id_, manifest, checksum, size in self.manifests(ids):
            if isinstance(manifest, Manifest):
                yield manifest, checksum, size
            elif isinstance(manifest, StoreUnavailable):
                self._unread.add(id_)
                self._counts.add("unread")
            else:
                self._counts.add("bad_manifests")

    def manifests(
        self, ids: Iterable[str]
    ) -> Iterator[tuple[str, Manifest | StoreError, str, int]]:
        """(id, manifest or what is wrong with it, its checksum, the segment's bytes)."""
        for id_, data in self._files.manifests(ids):
            if isinstance(data, StoreError):
                yield id_, data, "", 0
                continue
            try:
                manifest, checksum = Manifest.decode(data, id_)
            except StoreError as e:
                yield id_, e, "", 0
                continue
            yield id_, manifest, checksum, manifest.size(len(data))

    def add(self, manifest: Manifest, checksum: str, reservation: str | None = None) -> None:
        """Take in a segment that was just published; nobody can read what it replaced."""
        self._manifests.forget(manifest.segment_id)
        self._forgive(manifest.segment_id, unless=checksum)
        described = manifest, checksum, manifest.size(len(manifest.encode()[0]))
        self.catalog.add(described, reservation)

    def drop(self, segment_id: str, reason: str) -> None:
        """Forget a segment that was removed, but why."""
        self._manifests.forget(segment_id)
        self._forgive(segment_id)
        self.catalog.drop(segment_id, reason)

    # -- quarantine ------------------------------------------------------------------------------

    def report(self, segment: Segment | None, chunk: int, reason: str, proof: bool) -> None:
        """A chunk could not be read: count it, and quarantine it where it is proven bad.

        `segment`: None where it could not be opened; `proof` then says that it is gone.
        """
        if not proof:
            self._counts.add("unread")
            return
        self._counts.add("bad_packs")
        gone = segment is None
        if segment is not None:
            try:
                gone = self._files.stamp(segment.id) is None
            except StoreUnavailable:
                return
        if segment is None or gone:
            self._counts.add("gone")
        else:
            self.quarantine(segment.id, segment.checksum, chunk, reason)

    def quarantine(self, segment_id: str, checksum: str, chunk: int, reason: str) -> None:
        """Serve a segment only up to a bad chunk from now on."""
        with self._lock:
            self._bad.setdefault((segment_id, checksum), set()).add(chunk)
        self._counts.add("quarantined")
        with contextlib.suppress(StoreClosed):  # a reader may outlive its store
            self.catalog.quarantine(segment_id, checksum, chunk, reason)

    def repaired(self, segment: Segment, manifest: Manifest) -> None:
        """Take in a segment some packs of which were written again; marks on them go."""
        checksum = manifest.encode()[1]
        left = {}
        for chunk in self.marks(segment.manifest, segment.checksum):
            with contextlib.suppress(StoreUnavailable):
                if segment.whole(manifest, chunk):
                    continue
            left[chunk] = "bad before other chunks were repaired"
        self._manifests.forget(segment.id)
        self._forgive(segment.id)
        self.catalog.repaired(segment.id, checksum, left)

    def pardon(self, segment_id: str) -> None:
        """Serve a segment in full again, after it was found to be whole."""
        self._forgive(segment_id)
        self.catalog.pardon(segment_id)

    def _forgive(self, segment_id: str, *, unless: str = "") -> None:
        """Forget marks on a segment, but not on the one with the checksum `unless`."""
        with self._lock:
            for key in [k for k in self._bad if k[0] == segment_id and k[1] != unless]:
                del self._bad[key]
