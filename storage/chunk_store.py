"""The chunk store: prefixes of KV on disk, looked up by tokens, written and read in chunks.

Its promise: every fault becomes a miss and a recompute; never wrong KV, a hang or a crash.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import numpy as np

from ckv_jax.storage import chain, lookup
from ckv_jax.storage.catalog import Catalog, Described
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import SegmentDamaged, StoreClosed, StoreError, StoreFull
from ckv_jax.storage.eviction import evict
from ckv_jax.storage.files import Workspace
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.lookup import Loaded
from ckv_jax.storage.manifest import Manifest, check_order
from ckv_jax.storage.manifest_cache import ManifestCache
from ckv_jax.storage.open_segments import OpenSegments
from ckv_jax.storage.place import Place, open_place
from ckv_jax.storage.pool import DigestPool
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.reader import PrefixReader
from ckv_jax.storage.segment import Segment
from ckv_jax.storage.writer import SegmentWriter, draft_manifest

_TOUCH_S = 5.0  # times of use reach the index at most this often


class ChunkStore:
    """A store that is open; thread-safe, a context manager. Many processes may share one folder."""

    def __init__(self, place: Place, config: StoreConfig) -> None:
        """Use `open`."""
        self.config = config
        self.files = files = place.files
        self._context = place.context
        self._direct = place.direct
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bad: dict[tuple[str, str], int] = {}  # (segment, checksum) → first bad chunk
        self._used: dict[str, float] = {}
        self._touched = time.monotonic()
        self._closed = False
        self._manifests = ManifestCache(files)
        self._segments = OpenSegments()
        self._digests = DigestPool(config.digest_bytes)
        self._counts["swept"] = files.sweep()
        self.catalog = Catalog(files.catalog_path, self.describe, files.segment_ids)
        self.catalog.reconcile(files.workspaces())

    @classmethod
    def open(cls, url: str | os.PathLike[str], *, config: StoreConfig | None = None) -> ChunkStore:
        """Open or create a store; sweeps what killed writers left, and mends the index.

        Args:
          url: a folder, or a file://, s3://, gs:// or memory:// URL.
          config: limits and I/O settings.

        Raises:
          StoreError: the place is something else than a store, or cannot be used.
        """
        config = config or StoreConfig()
        return cls(open_place(url, config), config)

    # -- finding ---------------------------------------------------------------------------------

    def longest_prefix(
        self, tokens: np.ndarray, *, fingerprint: Fingerprint, layout: Layout, salt: str = ""
    ) -> Prefix:
        """The longest stored prefix of `tokens` [T]; its `num_tokens` may be 0.

        Whole chunks only, besides a partial chunk that ended a stored prefix and equals the prompt.
        Quarantined chunks, and all after them, count as not stored.
        """
        self._check_open()
        found = lookup.longest(
            chain.as_tokens(tokens),
            fingerprint=fingerprint,
            layout=layout,
            salt=salt,
            catalog=self.catalog,
            load=self.load,
        )
        self._count("hits" if found.num_tokens else "misses")
        return found

    def prefix(self, prefix_id: str, *, fingerprint: Fingerprint | None = None) -> Prefix:
        """A stored prefix by its id, or by the start of its id where that is unique.

        Raises:
          PrefixNotFound: with the ids that are close.
          FingerprintMismatch: it was made by another model than `fingerprint`; lists the fields.
        """
        self._check_open()
        found = lookup.by_id(prefix_id, catalog=self.catalog, load=self.load)
        if fingerprint is not None:
            found.fingerprint.require(fingerprint)
        return found

    def prefixes(self) -> list[Prefix]:
        """Every stored prefix that no other continues; damaged ones are left out."""
        self._check_open()
        found = []
        for id_ in self.catalog.leaves():
            loaded = self.load(id_)
            if loaded is not None:
                try:
                    found.append(lookup.resolve(loaded, loaded.manifest.chunks, self.load))
                except SegmentDamaged:
                    continue
        return sorted(found, key=lambda p: p.id)

    def load(self, segment_id: str) -> Loaded | None:
        """A segment's checked manifest and usable chunks; None when it is gone or damaged."""
        try:
            manifest, checksum = self._manifests.load(segment_id)
        except StoreError:
            return None
        marks = [*self.catalog.quarantined(segment_id, checksum), manifest.chunks]
        marks.append(self._bad.get((segment_id, checksum), manifest.chunks))
        return Loaded(manifest, checksum, max(0, min(marks)))

    def describe(self, ids: Iterable[str]) -> Iterator[Described]:
        """Manifest, checksum and size of segments, without those that are damaged."""
        for id_ in ids:
            try:
                manifest = Manifest.decode(self.files.manifest(id_), id_)
            except StoreError:
                self._count("bad_manifests")
                continue
            yield (*manifest, self.files.size(id_))

    # -- writing ---------------------------------------------------------------------------------

    def writer(
        self,
        *,
        fingerprint: Fingerprint,
        layout: Layout,
        tokens: np.ndarray,
        parent: Prefix | None = None,
        salt: str = "",
        order: np.ndarray | None = None,
    ) -> SegmentWriter:
        """Start a new segment; makes room for it first, by evicting others where there is a bound.

        Args:
          fingerprint: whose KV it is.
          layout: how to store it.
          tokens: [T], those of the new segment only, at least one.
          parent: the stored prefix that it continues; must end on a whole chunk.
          salt: the tenant's salt.
          order: for a reordered layout only: a permutation [T]; stored token i is `order[i]`.

        Raises:
          StoreFull: there is no room, and none can be made.
          StoreError: the store cannot be written.
        """
        self._check_open()
        tokens = chain.as_tokens(tokens)
        if not tokens.size:
            raise ValueError("tokens: got none, expected at least one")
        if (order is None) == layout.reordered:
            raise ValueError(f"order: got {order}, with layout.reordered={layout.reordered}")
        if parent is not None and parent.num_tokens == 0:
            parent = None
        start, before, holder = self._continue(parent, fingerprint, layout, salt)
        draft = draft_manifest(
            layout=layout,
            fingerprint=fingerprint,
            salt=salt,
            tokens=tokens,
            start=start,
            parent=holder.segment_id if holder else None,
            first_chunk=before,
            order=None if order is None else check_order(order, len(tokens)),
        )
        held = self._acquire(parent.spans) if parent else []  # nobody may evict them meanwhile
        workspace = None
        try:
            workspace = self.files.workspace()
            self._reserve(workspace.name, layout.segment_bytes(len(tokens)))
        except BaseException:
            self._segments.release(held)
            if workspace is not None:
                workspace.discard()
            raise

        def release() -> None:
            self.catalog.release(workspace.name)
            self._segments.release(held)

        params = held[-1].digest_params() if held and held[-1] else None
        return SegmentWriter(
            draft,
            workspace,
            direct=self._direct,
            params=params,
            publish=self._publish_after(parent),
            release=release,
        )

    @staticmethod
    def _continue(
        parent: Prefix | None, fingerprint: Fingerprint, layout: Layout, salt: str
    ) -> tuple[bytes, int, Span | None]:
        """(link, chunks before, last span) that a segment after `parent` starts with."""
        if parent is None:
            return chain.seed(fingerprint, layout, salt), 0, None
        parent.fingerprint.require(fingerprint)
        if parent.layout != layout or parent.salt != salt:
            raise ValueError("parent: expected one of the same layout and salt")
        if parent.num_tokens % layout.chunk_tokens:
            raise ValueError(
                f"parent: got {parent.num_tokens} tokens, expected whole chunks of "
                f"{layout.chunk_tokens} (Prefix.whole_chunks)"
            )
        return bytes.fromhex(parent.id), parent.num_chunks, parent.spans[-1]

    def _reserve(self, name: str, num_bytes: int) -> None:
        bound = self.config.max_bytes
        if bound is not None:
            with self._lock:
                excess = self.catalog.usage() + num_bytes - bound
                if excess > 0 and self._evict(excess) < excess:
                    raise StoreFull(
                        f"{num_bytes} bytes do not fit in max_bytes={bound}: what is stored is "
                        "pinned, continued by others, or being read"
                    )
                self.catalog.reserve(name, num_bytes)
        else:
            self.catalog.reserve(name, num_bytes)

    def _publish_after(self, parent: Prefix | None) -> Any:
        def publish(manifest: Manifest, checksum: str, workspace: Workspace) -> Prefix:
            return self._publish(parent, manifest, checksum, workspace)

        return publish

    def _publish(
        self, parent: Prefix | None, manifest: Manifest, checksum: str, workspace: Workspace
    ) -> Prefix:
        id_ = manifest.segment_id
        there = self.load(id_)
        whole = there is not None and there.usable == there.manifest.chunks
        whole = whole and not self.files.damaged(id_, manifest.files)
        if not workspace.publish(id_, replace=not whole):
            there = self.load(id_)  # another writer of the same prefix was faster
            if there is None:
                raise StoreError(f"segment {id_}: published by another writer, and lost")
            manifest, checksum = there.manifest, there.checksum
        self.catalog.add((manifest, checksum, self.files.size(id_)))
        span = Span(
            segment_id=id_,
            first_chunk=0,
            num_chunks=manifest.chunks,
            segment_chunks=manifest.chunks,
            checksum=checksum,
        )
        tokens = manifest.tokens
        if parent is not None:
            tokens = chain.as_tokens(np.concatenate([parent.tokens, tokens]))
        return Prefix(
            id=manifest.links[-1].hex(),
            tokens=tokens,
            spans=(*(parent.spans if parent else ()), span),
            layout=manifest.layout,
            fingerprint=manifest.fingerprint,
            salt=manifest.salt,
        )

    # -- reading ---------------------------------------------------------------------------------

    def reader(self, prefix: Prefix) -> PrefixReader:
        """Open a prefix for reading; its segments stay until the reader is closed.

        A segment that is gone already reads as missing packs, never as an error.
        """
        self._check_open()
        segments = self._acquire(prefix.spans)
        self._touch(s.segment_id for s in prefix.spans)
        return PrefixReader(
            prefix,
            segments,
            deadline_s=self.config.deadline_s,
            report=self._report,
            release=self._segments.release,
            digests=self._digest,
        )

    def _acquire(self, spans: Iterable[Span]) -> list[Segment | None]:
        held: list[Segment | None] = []
        for span in spans:
            try:
                held.append(
                    self._segments.acquire(span.segment_id, span.checksum, self._opener(span))
                )
            except StoreError:
                held.append(None)
        return held

    def _opener(self, span: Span) -> Any:
        def make() -> Segment:
            manifest, checksum = self._manifests.load(span.segment_id)
            if checksum != span.checksum:
                raise SegmentDamaged(f"segment {span.segment_id}: replaced")
            return Segment(manifest, checksum, self.files, self._context)

        return make

    def _digest(self, prefix: Prefix, load: Any) -> Any:
        return self._digests.get(prefix.spans, load)

    def _report(self, segment: Segment | None, chunk: int, reason: str) -> None:
        """A chunk turned out bad: count it, and serve its segment only up to it from now on."""
        self._count("bad_packs")
        if segment is None or self.files.stamp(segment.id) is None:
            self._count("gone")
            return
        with self._lock:
            key = (segment.id, segment.checksum)
            self._bad[key] = min(chunk, self._bad.get(key, chunk))
            self._counts["quarantined"] += 1
        self.catalog.quarantine(segment.id, segment.checksum, chunk, reason)

    # -- scores, bounds --------------------------------------------------------------------------

    def save_scores(self, segment_id: str, importance: np.ndarray, frequency: np.ndarray) -> None:
        """Keep a segment's importance, as float32 [groups, M], and frequency, as uint32."""
        self._check_open()
        importance = np.ascontiguousarray(importance, np.float32)
        frequency = np.ascontiguousarray(frequency, np.uint32)
        if importance.ndim != 2 or importance.shape != frequency.shape:
            raise ValueError(
                f"scores: got {importance.shape} and {frequency.shape}, expected one [groups, M]"
            )
        self.catalog.save_scores(segment_id, np.nan_to_num(importance), frequency)

    def load_scores(self, segment_id: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Importance float32 [groups, M] and frequency uint32 [groups, M], or None."""
        self._check_open()
        found, loaded = self.catalog.load_scores(segment_id), self.load(segment_id)
        if found is None or loaded is None:
            return None
        shape = (loaded.manifest.layout.groups, loaded.manifest.chunks)
        return found if found[0].shape == found[1].shape == shape else None

    def evict_to(self, max_bytes: int) -> int:
        """Evict whole segments until at most `max_bytes` are used; returns the bytes freed."""
        self._check_open()
        with self._lock:
            return self._evict(self.catalog.usage() - max_bytes)

    def _evict(self, excess: int) -> int:
        self._flush_touches()
        return evict(
            self.catalog.entries(),
            excess=excess,
            policy=self.config.eviction,
            keep=self.pinned_segments(),
            remove=self.remove_segment,
        )

    def remove_segment(self, segment_id: str) -> bool:
        """Remove one segment; False when somebody is reading it."""
        if not self.files.remove(segment_id):
            return False
        self._counts["evicted"] += 1
        self._manifests.forget(segment_id)
        self.catalog.drop(segment_id)
        return True

    def pinned_segments(self) -> set[str]:
        """Segments that a pinned prefix needs."""
        kept: set[str] = set()
        for id_ in self.files.pins():
            try:
                found = lookup.by_id(id_, catalog=self.catalog, load=self.load)
            except StoreError:
                continue  # what was pinned is gone
            kept.update(span.segment_id for span in found.spans)
        return kept

    def usage(self) -> int:
        """Bytes on disk of all segments, and bytes reserved by writers."""
        self._check_open()
        return self.catalog.usage()

    def stats(self) -> dict[str, int]:
        """Counters since `open`: hits, misses, bad_packs, gone, quarantined, evicted, swept, …"""
        with self._lock:
            found = {name: self._counts[name] for name in _COUNTERS}
        return found | {"rebuilds": self.catalog.rebuilds, "digest_pool_bytes": self._digests.bytes}

    # -- life ------------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _touch(self, ids: Iterable[str]) -> None:
        now = time.time()
        with self._lock:
            self._used.update((id_, now) for id_ in ids)
            due = time.monotonic() - self._touched > _TOUCH_S
        if due:
            self._flush_touches()

    def _flush_touches(self) -> None:
        used, self._used = self._used, {}
        self._touched = time.monotonic()
        if used:
            self.catalog.touch(used)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def close(self) -> None:
        """Close the store; readers that are still open stay usable. May be called twice."""
        if self._closed:
            return
        self._flush_touches()
        self._closed = True
        self._digests.clear()
        self.catalog.close()
        self.files.close()

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_COUNTERS = (
    "hits",
    "misses",
    "bad_packs",
    "gone",
    "quarantined",
    "bad_manifests",
    "evicted",
    "swept",
)
