"""The chunk store: prefixes of KV on disk, looked up by tokens, written and read in chunks.

Its promise: every fault becomes a miss and a recompute; never wrong KV, a hang or a crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeVar

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.codec import Codec, check_codec
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import StoreClosed, StoreUnavailable
from ckv_jax.storage.index.bounds import Bounds
from ckv_jax.storage.index.catalog import Eviction
from ckv_jax.storage.index.index import Counters, Index
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.disk import DiskTimeout
from ckv_jax.storage.place.place import Place, open_place
from ckv_jax.storage.prefix import Prefix, PrefixRecord, Span
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.reads import Gate, Proof, Report
from ckv_jax.storage.segment.repair import locate, rebuild, repair_packs
from ckv_jax.storage.segment.segment import Opened, OpenSegments, Segment
from ckv_jax.storage.segment.writer import SegmentWriter
from ckv_jax.storage.writing import Writers

T = TypeVar("T")


class ChunkStore:
    """A store that is open; thread-safe, a context manager. Many processes may share one folder.

    No call waits for the disk without end: what gets no further for `StoreConfig.wait_s`, or
    `write_s`, raises `StoreUnavailable`, and a lookup finds nothing.
    """

    def __init__(self, place: Place, config: StoreConfig, *, readonly: bool = False) -> None:
        """Use `open`."""
        self.config = config
        self.files = place.files
        self._place = place
        self._closed = False
        self._counts = Counters()
        self._counts.add("swept", self.files.sweep())
        self.gate = Gate()
        self.index = Index(
            self.files, self._counts, wait_s=config.wait_s, readonly=readonly, key=place.key
        )
        self._segments = OpenSegments(place, self.index.manifest, self._counts.add)
        self._proof = Proof(self.index.report, place.disk_timeout)
        self.bounds = Bounds(self.files, self.index, config, self._counts, place.key)
        self._writers = Writers(place, self.index, self.bounds, config, self._segments)
        if not readonly:
            self._counts.add("swept", self.bounds.sweep())

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        config: StoreConfig | None = None,
        readonly: bool = False,
    ) -> Self:
        """Open or create a store; sweeps what killed writers left, and repairs the index.

        Args:
          url: a folder, or a file://, s3://, gs:// or memory:// URL.
          config: limits and I/O settings.
          readonly: only look: nothing is created, changed or removed, and nothing can be written.

        Raises:
          StoreError: the place is something else than a store, or cannot be used; or it is
            encrypted and `config` has no key or another one, or the reverse.
          ValueError: the key file has no key, or the `cryptography` package is missing.
        """
        config = config or StoreConfig()
        disk_timeout = DiskTimeout(config.wait_s)

        made: list[Self] = []

        def work() -> list[Self]:
            place = open_place(url, config, disk_timeout, readonly=readonly)
            try:
                made.append(cls(place, config, readonly=readonly))
            except BaseException:
                place.close()
                raise
            return made

        try:
            disk_timeout.run(f"opening {url}", work, late=lambda made: made[0].close())
        except BaseException:
            disk_timeout.close()
            raise
        return made[0]

    @property
    def reads_past_cache(self) -> bool:
        """Whether reads go past the page cache, so that they come from the disk."""
        return self._place.direct

    def stats(self) -> dict[str, int]:
        """Counters since `open`: hits, misses, bad_packs, gone, unread, quarantined, evicted, …"""
        found = {name: self._counts[name] for name in _COUNTERS}
        found["rebuilds"] = self.index.catalog.rebuilds
        found["refused_writes"] = self.index.catalog.refused
        return found

    # -- finding ---------------------------------------------------------------------------------

    def longest_prefix(
        self,
        tokens: np.ndarray,
        *,
        fingerprint: Fingerprint,
        layout: Layout,
        salt: str = "",
        provenance: str = chain.EXACT,
        marked: bool = False,
    ) -> Prefix:
        """The longest stored prefix of `tokens` [T]; its `num_tokens` may be 0.

        Whole chunks only, besides a partial chunk that ended a stored prefix and equals the prompt.
        Quarantined chunks, and all after them, count as not stored.

        Args:
          tokens: of the prompt.
          fingerprint, layout, salt: whose KV, and how it is stored.
          provenance: what may serve besides exact KV, such as "budget:0.25".
          marked: whether quarantined chunks count as stored, which is for `replace_packs`.
        """
        tokens = chain.as_tokens(tokens)
        salt, provenance = chain.check_salt(salt), chain.check_provenance(provenance)

        def work() -> Prefix:
            return self.index.longest(
                tokens, fingerprint, layout, salt, provenance=provenance, marked=marked
            )

        try:
            return self._run("looking a prefix up", work)
        except StoreUnavailable:
            self._counts.add("unread")
            self._counts.add("misses")
        return Prefix.empty(fingerprint, layout, salt)

    def prefix(
        self, prefix_id: str, *, fingerprint: Fingerprint | None = None, salt: str | None = None
    ) -> Prefix:
        """A stored prefix by its id, or by the start of its id where that is unique.

        Args:
          prefix_id: hex.
          fingerprint: of the model that must have made it.
          salt: of the tenant whose it must be; other tenants' do not exist for it. None, for tools:
            any tenant's; the `salt` of what belongs to a tenant then equals no tenant's.

        Raises:
          PrefixNotFound: with the ids that are close, of the same tenant.
          FingerprintMismatch: it was made by another model than `fingerprint`; lists the fields.
        """
        if salt is not None:
            chain.check_salt(salt)
        found = self._run("looking a prefix up", lambda: self.index.prefix(prefix_id, salt))
        if fingerprint is not None:
            found.fingerprint.require(fingerprint)
        return found

    def prefixes(self, *, salt: str | None = None) -> list[Prefix]:
        """Every stored prefix that no other continues, without damaged ones; None: all tenants'."""
        return self._run("listing prefixes", lambda: self.index.prefixes(salt))

    def why_evicted(self, prefix_id: str, *, salt: str | None = None) -> Eviction | None:
        """When and why a prefix that is no longer stored left; None: nothing is known of it."""
        whose = None if salt is None else chain.tenant_mark(salt)
        return self._run("asking", lambda: self.index.catalog.why(prefix_id, whose))

    def refresh(self) -> None:
        """Find what other processes wrote to an object store; a folder needs no refreshing."""
        self._run("looking for segments", self.index.refresh)

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
        provenance: str = chain.EXACT,
        codec: Codec | None = None,
    ) -> SegmentWriter:
        """Start a new segment; makes room for it first, by evicting others where there is a bound.

        Args:
          fingerprint: whose KV it is.
          layout: how to store it.
          tokens: [T], those of the new segment only, at least one.
          parent: the stored prefix that it continues; must end on a whole chunk.
          salt: the tenant's salt.
          order: for a reordered layout only: a permutation [T], stored token i is `order[i]`; one
            for each layer [L, T] where it has `layer_orders`.
          provenance: how the KV was made, see `longest_prefix`; the parent's, or after exact KV.
          codec: the one that `layout` names.

        Raises:
          StoreFull: there is no room, and none can be made; nothing was evicted.
          StoreError: the store cannot be written.
        """
        tokens = chain.as_tokens(tokens)
        chain.check_salt(salt)
        chain.check_provenance(provenance)
        if not tokens.size:
            raise ValueError("tokens: got none, expected at least one")
        if (order is None) == layout.reordered:
            raise ValueError(f"order: got {order}, with layout.reordered={layout.reordered}")
        check_codec(codec, layout)
        if parent is not None and parent.num_tokens == 0:
            parent = None

        def work() -> SegmentWriter:
            return self._writers.start(
                fingerprint=fingerprint,
                layout=layout,
                tokens=tokens,
                parent=parent,
                salt=salt,
                order=order,
                provenance=provenance,
                codec=codec,
            )

        seconds = self.config.write_s
        return self._run("making room", work, seconds=seconds, late=lambda w: w.close())

    def marked_chunks(self, prefix: Prefix) -> np.ndarray:
        """int64 [n]: the chunks of a prefix that are marked as bad, ascending."""
        return self._run("reading marks", lambda: self.index.marked_chunks(prefix))

    def replace_packs(
        self, prefix: Prefix, first_chunk: int, kv: np.ndarray, *, codec: Codec | None = None
    ) -> int:
        """Write packs and probes again that are proven bad, in the segment where they are.

        The marks of chunks that are whole again are lifted; the prefix must be looked up again.
        Of alike tokens those packs are written all of whose tokens are in `kv`, as `reach` of a
        reader says; and the assignment, if it is bad, where all tokens of the segment are.

        Args:
          prefix: stored, as `longest_prefix(marked=True)` finds it.
          first_chunk: first chunk that was computed again; of a run, where tokens are alike.
          kv: [L, 2, t, K, D] of layout.numpy_dtype, in stored order, or of alike tokens by
            position: whole chunks from there on, or up to the end of the prefix, all within one
            segment.
          codec: the one that the prefix's layout names.

        Returns:
          How many packs, chunks of probes and rows of assignments were bad, and are good now.

        Raises:
          StoreUnavailable: another process is repairing the segment, or the disk gives no answer.
          SegmentDamaged: the segment is gone, or which tokens are in its packs is unknown.
        """
        check_codec(codec, prefix.layout)
        span, first = locate(prefix, first_chunk, kv)

        def work() -> int:
            with self._repairing(span) as segment:
                manifest, count = repair_packs(self.files, segment, first, kv, codec)
                self.index.repaired(segment, manifest)
                return count

        return self._run("repairing a segment", work, seconds=self.config.write_s)

    def rebuild_probes(self, prefix: Prefix, *, codec: Codec | None = None) -> int:
        """Make probes and digests again that are proven bad, in segments that are marked.

        They follow from the keys in the packs, so that nothing need be computed. The marks of
        chunks that are whole again are lifted; the prefix must be looked up again.

        Args:
          prefix: stored, as `longest_prefix(marked=True)` finds it.
          codec: the one that its layout names.

        Returns:
          How many chunks of probes and layers of digests were bad, and are good now.

        Raises:
          StoreUnavailable: another process is repairing a segment, or the disk gives no answer.
          SegmentDamaged: a segment is gone.
        """
        check_codec(codec, prefix.layout)

        def work() -> int:
            total = 0
            for span in prefix.spans:
                if not self.index.marked(span):
                    continue
                with self._repairing(span) as segment:
                    params = functools.partial(self._writers.params_near, segment.manifest)
                    manifest, count = rebuild(self.files, segment, params, codec)
                    self.index.repaired(segment, manifest)
                    total += count
            return total

        return self._run("repairing segments", work, seconds=self.config.write_s)

    @contextlib.contextmanager
    def _repairing(self, span: Span) -> Iterator[Segment]:
        """A span's segment, held open by the only one who repairs it."""
        segment = self._segments.acquire(span)
        try:
            alone = self.files.repairing(span.segment_id)
            try:
                yield segment
            finally:
                alone.release()
        finally:
            self._segments.release([segment])

    # -- reading ---------------------------------------------------------------------------------

    def reader(
        self, prefix: Prefix, *, deadline_s: float | None = None, lazily: bool = False
    ) -> PrefixReader:
        """Open a prefix for reading; its segments stay until the reader is closed.

        A segment that is gone already, or cannot be opened just now, reads as missing packs, never
        as an error. `deadline_s`: seconds for each of its calls; default: the store's. `lazily`:
        nothing is opened before the first read; until then nothing keeps its segments.
        """
        self._check_open()

        def open_all() -> Sequence[Opened]:
            return self._opened(prefix)

        return PrefixReader(
            prefix,
            open_all if lazily else self._opened(prefix),
            deadline_s=self.config.deadline_s if deadline_s is None else deadline_s,
            gate=self.gate,
            proof=self._proof,
            count=self._counts.add,
            disk_timeout=self._place.disk_timeout,
            release=self._segments.release,
        )

    def _opened(self, prefix: Prefix) -> Sequence[Opened]:
        """The segments of a prefix, or why they cannot be opened just now."""

        def work() -> list[Opened]:
            found = self._segments.acquire_all(prefix.spans)
            if self.bounds.touch(prefix):
                self.bounds.flush()
            return found

        try:
            return self._run("opening segments", work, late=self._segments.release)
        except StoreUnavailable as e:
            self._counts.add("unread")
            return [e.with_traceback(None)] * len(prefix.spans)

    def touch(self, prefix: Prefix) -> None:
        """Note that a prefix is in use, though nothing of it is read."""
        if self.bounds.touch(prefix) and not self._closed:
            with contextlib.suppress(StoreUnavailable):
                self._run("noting times of use", self.bounds.flush)

    def open_segment(self, manifest: Manifest, checksum: str) -> Segment:
        """Open a published segment, to be read as any zarr reader would, by its shards' indexes.

        The caller closes it. Raises SegmentDamaged when it is gone, StoreUnavailable when that
        is unknown.
        """
        place = dataclasses.replace(self._place, queues=None)
        return self._run("opening a segment", lambda: Segment(manifest, checksum, place))

    def segment_reader(
        self,
        prefix: Prefix,
        segment: Segment,
        report: Report,
    ) -> PrefixReader:
        """A reader over an opened segment that gives `report` what it finds, and the store nothing.

        It closes the segment.
        """
        return PrefixReader(
            prefix,
            [segment],
            deadline_s=self.config.deadline_s,
            gate=self.gate,
            proof=Proof(report, self._place.disk_timeout),
            count=lambda _: None,
            disk_timeout=self._place.disk_timeout,
            release=lambda _: segment.close(),
        )

    # -- scores, bounds --------------------------------------------------------------------------

    def save_scores(self, segment_id: str, importance: np.ndarray, frequency: np.ndarray) -> None:
        """Keep a segment's importance, as float32 [groups, M], and frequency, as uint32."""
        importance = np.ascontiguousarray(importance, np.float32)
        frequency = np.ascontiguousarray(frequency, np.uint32)
        if importance.ndim != 2 or importance.shape != frequency.shape:
            raise ValueError(
                f"scores: got {importance.shape} and {frequency.shape}, expected one [groups, M]"
            )
        scores = np.nan_to_num(importance), frequency
        self._run("saving scores", lambda: self.index.catalog.save_scores(segment_id, *scores))

    def load_scores(self, segment_id: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Importance float32 [groups, M] and frequency uint32 [groups, M], or None."""

        def work() -> tuple[np.ndarray, np.ndarray] | None:
            found, loaded = self.index.catalog.load_scores(segment_id), self.index.load(segment_id)
            if found is None or loaded is None:
                return None
            shape = (loaded.manifest.layout.groups, loaded.manifest.chunks)
            return found if found[0].shape == found[1].shape == shape else None

        return self._run("loading scores", work)

    def set_record(self, prefix_id: str, record: PrefixRecord, *, salt: str | None = None) -> str:
        """Note durably what is wanted of a prefix, in place of what was; returns its whole id.

        Raises:
          PrefixNotFound: there is no such prefix.
        """

        def work() -> str:
            found = self.index.prefix(prefix_id, salt)
            self.bounds.set_record(found.id, record)
            return found.id

        return self._run("noting a record", work)

    def records(self, *, salt: str | None = None) -> dict[str, PrefixRecord]:
        """What is wanted of prefixes, by id; None: of all tenants."""
        whose = None if salt is None else chain.tenant_mark(salt)
        return self._run("reading records", lambda: self.bounds.records(whose))

    def sizes(self, *, salt: str | None = None) -> dict[str, tuple[int, float]]:
        """(bytes, time of last use in seconds since the epoch) of each segment, by id; None: of
        all tenants."""
        whose = None if salt is None else chain.tenant_mark(salt)

        def work() -> dict[str, tuple[int, float]]:
            return {e.id: (e.bytes, e.used) for e in self.index.catalog.entries(whose)}

        return self._run("adding up", work)

    def record_of(self, prefix: Prefix) -> PrefixRecord:
        """What is wanted of one prefix."""
        return self._run("reading a record", lambda: self.bounds.record_of(prefix.id))

    def evict_to(self, max_bytes: int) -> int:
        """Evict whole segments until at most `max_bytes` are used; returns the bytes freed."""
        seconds = self.config.write_s
        return self._run("evicting", lambda: self.bounds.evict_to(max_bytes), seconds=seconds)

    def evict_expired(self) -> int:
        """Evict what has outlived its `retain_s`; returns the bytes freed."""
        return self._run("evicting", self.bounds.evict_expired, seconds=self.config.write_s)

    def delete(self, prefix: Prefix) -> int:
        """Remove a stored prefix, what continues it, and what only it needs; returns bytes freed.

        What others need or are reading stays, and so does what is pinned. A prefix that ends
        inside of a segment goes with what lies behind it there.
        """
        ids = [span.segment_id for span in prefix.spans]
        return self._run("deleting", lambda: self.bounds.delete(ids), seconds=self.config.write_s)

    def remove_segment(self, segment_id: str) -> bool:
        """Remove one segment that nothing continues; False while it is read."""
        reason = "deleted by its owner: its text has ended"
        seconds = self.config.write_s
        return self._run(
            "deleting", lambda: self.bounds.remove(segment_id, reason), seconds=seconds
        )

    def usage(self) -> int:
        """Bytes on disk of all segments, and bytes reserved by writers that live."""
        return self._run("adding up", self.bounds.usage)

    # -- life ------------------------------------------------------------------------------------

    def _run(
        self,
        what: str,
        work: Callable[[], T],
        *,
        seconds: float | None = None,
        late: Callable[[T], object] | None = None,
    ) -> T:
        """Ask the disk, with an end to the wait; raises StoreClosed."""
        self._check_open()

        def there() -> T:
            self.files.require()
            return work()

        return self._place.disk_timeout.run(what, there, seconds=seconds, late=late)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def close(self) -> None:
        """Close the store; readers that are still open stay usable. May be called twice."""
        if self._closed:
            return
        self._closed = True

        def work() -> None:
            with contextlib.suppress(StoreUnavailable):
                self.files.require()  # else an index would be made where the store was
                self.bounds.flush()
            self.index.catalog.close()

        with contextlib.suppress(StoreUnavailable):
            self._place.disk_timeout.run("closing the store", work)
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_COUNTERS = (
    "hits",
    "misses",
    "bad_packs",
    "gone",
    "unread",
    "lost_digests",
    "mixed_digests",
    "quarantined",
    "bad_manifests",
    "evicted",
    "evicted_room",
    "evicted_expired",
    "evicted_pruned",
    "evicted_deleted",
    "swept",
)
