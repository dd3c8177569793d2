"""Which segments can be served, and how far: catalog, manifests and quarantine together."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from ckv_jax.storage.errors import SegmentDamaged, StoreError
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.index import lookup
from ckv_jax.storage.index.catalog import Catalog, Described
from ckv_jax.storage.index.lookup import Loaded
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.manifest_cache import ManifestCache
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

    def __init__(self, files: Files, counts: Counters) -> None:
        self._files = files
        self._counts = counts
        self._lock = threading.Lock()
        self._bad: dict[tuple[str, str], int] = {}  # (segment, checksum) → first bad chunk
        self._manifests = ManifestCache(files)
        self.catalog = Catalog(files.catalog_path, self.describe, files.segment_ids)
        self.refresh()

    def refresh(self) -> None:
        """Bring the catalog in line with what is there."""
        self.catalog.reconcile(self._files.workspaces)

    # -- finding ---------------------------------------------------------------------------------

    def longest(
        self, tokens: np.ndarray, fingerprint: Fingerprint, layout: Layout, salt: str
    ) -> Prefix:
        """The longest prefix of `tokens` int32 [T] that can be served."""
        found = lookup.longest(
            tokens,
            fingerprint=fingerprint,
            layout=layout,
            salt=salt,
            catalog=self.catalog,
            load=self.load,
        )
        self._counts.add("hits" if found.num_tokens else "misses")
        return found

    def prefix(self, prefix_id: str) -> Prefix:
        """The prefix of an id, or of the start of one; raises PrefixNotFound."""
        return lookup.by_id(prefix_id, catalog=self.catalog, load=self.load)

    def prefixes(self) -> list[Prefix]:
        """Every prefix that no other continues, without damaged ones."""
        found = []
        for id_ in self.catalog.leaves():
            loaded = self.load(id_)
            if loaded is not None:
                try:
                    found.append(lookup.resolve(loaded, loaded.manifest.chunks, self.load))
                except SegmentDamaged:
                    continue
        return sorted(found, key=lambda p: p.id)

    # -- segments --------------------------------------------------------------------------------

    def load(self, segment_id: str) -> Loaded | None:
        """A segment's checked manifest and usable chunks; None when it is gone or damaged."""
        try:
            manifest, checksum = self._manifests.load(segment_id)
        except StoreError:
            return None
        marks = [*self.catalog.quarantined(segment_id, checksum), manifest.chunks]
        marks.append(self._bad.get((segment_id, checksum), manifest.chunks))
        return Loaded(manifest, checksum, max(0, min(marks)))

    def manifest(self, segment_id: str, checksum: str) -> Manifest:
        """The manifest with this checksum; raises SegmentDamaged when it is gone or another."""
        manifest, found = self._manifests.load(segment_id)
        if found != checksum:
            raise SegmentDamaged(f"segment {segment_id}: replaced")
        return manifest

    def describe(self, ids: Iterable[str]) -> Iterator[Described]:
        """Manifest, checksum and size of segments, without those that are damaged."""
        for id_, data in self._files.manifests(ids):
            try:
                manifest, checksum = Manifest.decode(data, id_)
            except StoreError:
                self._counts.add("bad_manifests")
                continue
            yield manifest, checksum, manifest.size(len(data))

    def add(self, manifest: Manifest, checksum: str) -> None:
        """Take in a segment that was just published; nobody can read what it replaced."""
        self._manifests.forget(manifest.segment_id)
        self._forgive(manifest.segment_id, unless=checksum)
        self.catalog.add((manifest, checksum, manifest.size(len(manifest.encode()[0]))))

    def drop(self, segment_id: str) -> None:
        """Forget a segment that was removed."""
        self._manifests.forget(segment_id)
        self.catalog.drop(segment_id)

    # -- quarantine ------------------------------------------------------------------------------

    def report(self, segment: Segment | None, chunk: int, reason: str) -> None:
        """A chunk could not be read: count it, and quarantine it unless its segment is gone."""
        self._counts.add("bad_packs")
        if segment is None or self._files.stamp(segment.id) is None:
            self._counts.add("gone")
        else:
            self.quarantine(segment.id, segment.checksum, chunk, reason)

    def quarantine(self, segment_id: str, checksum: str, chunk: int, reason: str) -> None:
        """Serve a segment only up to a bad chunk from now on."""
        with self._lock:
            key = (segment_id, checksum)
            self._bad[key] = min(chunk, self._bad.get(key, chunk))
        self._counts.add("quarantined")
        self.catalog.quarantine(segment_id, checksum, chunk, reason)

    def pardon(self, segment_id: str) -> None:
        """Serve a segment in full again, after it was found to be whole."""
        self._forgive(segment_id)
        self.catalog.pardon(segment_id)

    def _forgive(self, segment_id: str, *, unless: str = "") -> None:
        """Forget marks on a segment, but not on the one with the checksum `unless`."""
        with self._lock:
            for key in [k for k in self._bad if k[0] == segment_id and k[1] != unless]:
                del self._bad[key]
