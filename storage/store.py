"""The chunk store: prefixes of KV on disk, looked up by tokens, written and read in chunks.

Its promise: every fault becomes a miss and a recompute; never wrong KV, a hang or a crash.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.digest.pool import DigestPool
from ckv_jax.storage.errors import StoreClosed, StoreError
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.index.bounds import Bounds
from ckv_jax.storage.index.index import Counters, Index
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.files import Workspace
from ckv_jax.storage.place.place import Place, open_place
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.deadline import Gate
from ckv_jax.storage.segment.manifest import Manifest, check_order
from ckv_jax.storage.segment.open_segments import OpenSegments
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.segment import Segment
from ckv_jax.storage.segment.writer import SegmentWriter, draft_manifest


class ChunkStore:
    """A store that is open; thread-safe, a context manager. Many processes may share one folder."""

    def __init__(self, place: Place, config: StoreConfig) -> None:
        """Use `open`."""
        self.config = config
        self.files = place.files
        self._place = place
        self._closed = False
        self._counts = Counters()
        self._counts.add("swept", self.files.sweep())
        self.gate = Gate()
        self._segments = OpenSegments()
        self._digests = DigestPool(config.digest_bytes)
        self.index = Index(self.files, self._counts)
        self.bounds = Bounds(self.files, self.index, config, self._counts)

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
        return self.index.longest(chain.as_tokens(tokens), fingerprint, layout, salt)

    def prefix(self, prefix_id: str, *, fingerprint: Fingerprint | None = None) -> Prefix:
        """A stored prefix by its id, or by the start of its id where that is unique.

        Raises:
          PrefixNotFound: with the ids that are close.
          FingerprintMismatch: it was made by another model than `fingerprint`; lists the fields.
        """
        self._check_open()
        found = self.index.prefix(prefix_id)
        if fingerprint is not None:
            found.fingerprint.require(fingerprint)
        return found

    def prefixes(self) -> list[Prefix]:
        """Every stored prefix that no other continues; damaged ones are left out."""
        self._check_open()
        return self.index.prefixes()

    def refresh(self) -> None:
        """Find what other processes wrote to an object store; a folder needs no refreshing."""
        self._check_open()
        self.index.refresh()

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
            self.bounds.reserve(workspace.name, layout.segment_bytes(len(tokens)))
        except BaseException:
            self._segments.release(held)
            if workspace is not None:
                workspace.discard()
            raise

        def release() -> None:
            self.bounds.release(workspace.name)
            self._segments.release(held)

        params = held[-1].digest_params() if held and held[-1] else None
        return SegmentWriter(
            draft,
            workspace,
            direct=self._place.direct,
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

    def _publish_after(self, parent: Prefix | None) -> Any:
        def publish(manifest: Manifest, checksum: str, workspace: Workspace) -> Prefix:
            return self._publish(parent, manifest, checksum, workspace)

        return publish

    def _publish(
        self, parent: Prefix | None, manifest: Manifest, checksum: str, workspace: Workspace
    ) -> Prefix:
        id_ = manifest.segment_id

        def keep() -> bool:
            there = self.index.load(id_)
            whole = there is not None and there.usable == there.manifest.chunks
            return whole and not self.files.damaged(id_, manifest.files)

        if not workspace.publish(id_, keep):  # another writer of the same prefix was faster
            there = self.index.load(id_)
            if there is None:
                raise StoreError(f"segment {id_}: published by another writer, and gone again")
            manifest, checksum = there.manifest, there.checksum
        self.index.add(manifest, checksum)
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

    def reader(self, prefix: Prefix, *, deadline_s: float | None = None) -> PrefixReader:
        """Open a prefix for reading; its segments stay until the reader is closed.

        A segment that is gone already reads as missing packs, never as an error. `deadline_s`:
        seconds for each of its calls; default: the store's.
        """
        self._check_open()
        segments = self._acquire(prefix.spans)
        self.bounds.touch(s.segment_id for s in prefix.spans)
        return PrefixReader(
            prefix,
            segments,
            deadline_s=self.config.deadline_s if deadline_s is None else deadline_s,
            gate=self.gate,
            report=self.index.report,
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
            manifest = self.index.manifest(span.segment_id, span.checksum)
            return Segment(manifest, span.checksum, self._place)

        return make

    def open_segment(self, manifest: Manifest, checksum: str) -> Segment:
        """Open a published segment, to be read as any zarr reader would, by its shards' indexes.

        The caller closes it. Raises SegmentDamaged when it is gone.
        """
        return Segment(manifest, checksum, dataclasses.replace(self._place, queues=None))

    def _digest(self, prefix: Prefix, load: Any) -> Any:
        return self._digests.get(prefix.spans, load)

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
        self.index.catalog.save_scores(segment_id, np.nan_to_num(importance), frequency)

    def load_scores(self, segment_id: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Importance float32 [groups, M] and frequency uint32 [groups, M], or None."""
        self._check_open()
        found, loaded = self.index.catalog.load_scores(segment_id), self.index.load(segment_id)
        if found is None or loaded is None:
            return None
        shape = (loaded.manifest.layout.groups, loaded.manifest.chunks)
        return found if found[0].shape == found[1].shape == shape else None

    def usage(self) -> int:
        """Bytes on disk of all segments, and bytes reserved by writers."""
        self._check_open()
        return self.index.catalog.usage()

    def stats(self) -> dict[str, int]:
        """Counters since `open`: hits, misses, bad_packs, gone, quarantined, evicted, swept, …"""
        found = {name: self._counts[name] for name in _COUNTERS}
        found["rebuilds"] = self.index.catalog.rebuilds
        found["refused_writes"] = self.index.catalog.refused
        found["digest_pool_bytes"] = self._digests.bytes
        return found

    # -- life ------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def close(self) -> None:
        """Close the store; readers that are still open stay usable. May be called twice."""
        if self._closed:
            return
        self.bounds.flush()
        self._closed = True
        self._digests.clear()
        self.index.catalog.close()
        self._place.close()

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
