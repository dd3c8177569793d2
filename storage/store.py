"""The chunk store: stores prefixes of KV on disk, looks them up by tokens, reads and writes chunks.

Every fault becomes a miss and a recompute, never wrong KV, a hang or a crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeVar, cast

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.codec import Codec, check_codec
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import SegmentDamaged, StoreClosed, StoreUnavailable
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
    """An open store. Thread-safe; a context manager. Many processes may share one folder.

    Every call has a time limit: without progress for `StoreConfig.wait_s` (writes: `write_s`) it
    raises `StoreUnavailable`; a lookup returns a miss instead.
    """

    def __init__(self, place: Place, config: StoreConfig, *, readonly: bool = False) -> None:
        """Opens a store at a place; callers use `open`."""
        self.config = config
        self.files = place.files
        self._place = place
        self._closed = False
        self._counts = Counters()
        self._counts.add("swept", self.files.sweep())
        self.gate = Gate()
        # The index gives up in time to go on without its file, before its caller gives up.
        wait_s = config.wait_s / 2
        self.index = Index(
            self.files, self._counts, wait_s=wait_s, readonly=readonly, key=place.key
        )
        self._segments = OpenSegments(place, self.index.manifest, self._counts.add)
        self._proof = Proof(self.index.report, place.disk_timeout)
        self.bounds = Bounds(self.files, self.index, config, self._counts, place.key)
        if not self.files.holding:  # a claim takes what is open, too
            self.bounds.in_use.append(self._segments.ids)
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
        """Opens or creates a store; removes files of killed writers and repairs the index.

        Args:
          url: a folder, or a file://, s3://, gs:// or memory:// URL.
          config: limits and I/O settings; None: the defaults.
          readonly: create, change and remove nothing; writes raise `StoreError`.

        Raises:
          StoreError: the place is not a store and not empty, or cannot be used.
          WrongKey: the store is encrypted and `config` has no key or another one, or the reverse.
          StoreUnavailable: the disk or the object store did not answer.
          ValueError: the key file has no key, or the `cryptography` package is missing.
        """
        config = config or StoreConfig()
        disk_timeout = DiskTimeout(config.wait_s)

        def work() -> ChunkStore:
            place = open_place(url, config, disk_timeout, readonly=readonly)
            try:
                return cls(place, config, readonly=readonly)
            except BaseException:
                place.close()
                raise

        try:
            opened = disk_timeout.run(f"opening {url}", work, late=lambda store: store.close())
        except BaseException:
            disk_timeout.close()
            raise
        return cast(Self, opened)

    @property
    def reads_past_cache(self) -> bool:
        """Whether reads use direct I/O, which bypasses the page cache."""
        return self._place.direct

    def stats(self) -> dict[str, int]:
        """Returns the counters since `open`: hits, misses, bad_packs, gone, unread, quarantined,
        evicted and others."""
        found = {name: self._counts[name] for name in _COUNTERS}
        found["rebuilds"] = self.index.catalog.db.rebuilds
        found["refused_writes"] = self.index.catalog.db.refused
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
        """Finds the longest stored prefix of `tokens`; its `num_tokens` may be 0.

        It consists of whole chunks, and of a partial chunk only where that ends a stored prefix and
        equals the prompt. Quarantined chunks, and all after them, count as not stored. A disk that
        does not answer counts as a miss.

        Args:
          tokens: token ids of the prompt, int [T].
          fingerprint, layout, salt: of the model, the KV and the tenant.
          provenance: provenance that is accepted besides exact KV, such as "budget:0.25".
          marked: whether quarantined chunks count as stored, for `replace_packs`.
        """
        tokens = chain.as_tokens(tokens)
        salt, provenance = chain.check_salt(salt), chain.check_provenance(provenance)

        try:
            return self._run(
                "looking a prefix up",
                lambda: self.index.longest(
                    tokens, fingerprint, layout, salt, provenance=provenance, marked=marked
                ),
            )
        except StoreUnavailable:
            self._counts.add("unread")
            self._counts.add("misses")
        return Prefix.empty(fingerprint, layout, salt)

    def prefix(
        self, prefix_id: str, *, fingerprint: Fingerprint | None = None, salt: str | None = None
    ) -> Prefix:
        """Returns a stored prefix by its id, or by a unique start of its id.

        Args:
          prefix_id: hex digits.
          fingerprint: the model that the KV must be from; None: any.
          salt: the tenant's salt; prefixes of other tenants are not found. None, for tools: any
            tenant; the returned `salt` of a tenant's prefix then equals no tenant's salt.

        Raises:
          PrefixNotFound: no prefix matches, or several; lists similar ids of the same tenant.
          FingerprintMismatch: the KV is from another model than `fingerprint`; lists the fields.
        """
        if salt is not None:
            chain.check_salt(salt)
        found = self._run("looking a prefix up", lambda: self.index.prefix(prefix_id, salt))
        if fingerprint is not None:
            found.fingerprint.require(fingerprint)
        return found

    def prefixes(self, *, salt: str | None = None) -> list[Prefix]:
        """Lists the undamaged stored prefixes that no other continues; `salt` None: of all
        tenants."""
        return self._run("listing prefixes", lambda: self.index.prefixes(salt))

    def why_evicted(self, prefix_id: str, *, salt: str | None = None) -> Eviction | None:
        """Returns when and why a prefix was evicted; None if that is unknown."""
        whose = None if salt is None else chain.tenant_mark(salt)
        return self._run("asking", lambda: self.index.catalog.why(prefix_id, whose))

    def refresh(self) -> None:
        """Finds segments that other processes wrote to an object store; not needed for a folder."""
        self._run("looking for segments", self.index.catalog.reconcile)

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
        """Starts a new segment; evicts others first if a size limit requires it.

        Args:
          fingerprint, layout, salt: of the model, the KV and the tenant.
          tokens: token ids of the new segment only, int [T], at least one.
          parent: the stored prefix that the segment continues; must end on a whole chunk.
          order: for a reordered layout only: a permutation for each layer, int [L, T]; stored token
            i of layer l is `order[l, i]`.
          provenance: how the KV was made, see `longest_prefix`; equal to the parent's, unless that
            is exact.
          codec: the codec that `layout` names.

        Raises:
          StoreFull: there is not enough room; nothing was evicted.
          StoreError: the store cannot be written.
          ValueError: the arguments do not fit together.
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

        work = functools.partial(
            self._writers.start, fingerprint, layout, tokens, parent, salt, order, provenance, codec
        )
        seconds = self.config.write_s
        return self._run("making room", work, seconds=seconds, late=lambda w: w.close())

    def marked_chunks(self, prefix: Prefix) -> np.ndarray:
        """Returns the chunk ids of a prefix that are marked as bad, int64 [n], ascending."""
        return self._run("reading marks", lambda: self.index.marked_chunks(prefix))

    def replace_packs(
        self, prefix: Prefix, first_chunk: int, kv: np.ndarray, *, codec: Codec | None = None
    ) -> int:
        """Rewrites packs and probes that are proven bad, in their segment.

        It unmarks chunks that are good again; look the prefix up again afterwards. Of clustered
        tokens it writes the packs whose tokens are all in `kv` (see `reach` of a reader), and a bad
        assignment if `kv` has all tokens of the segment.

        Args:
          prefix: a prefix found by `longest_prefix(marked=True)`.
          first_chunk: first recomputed chunk; the first of a run where tokens are clustered.
          kv: [L, 2, t, K, D] of layout.numpy_dtype, in stored order, or by position where tokens
            are clustered: whole chunks, or up to the end of the prefix, all within one segment.
          codec: the codec that the prefix's layout names.

        Returns:
          The number of packs, chunks of probes and rows of assignments that were repaired.

        Raises:
          StoreUnavailable: another process is repairing the segment, or the disk did not answer.
          SegmentDamaged: the segment is gone, another process has just repaired it, or its
            assignment of tokens to packs is lost.
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
        """Rebuilds probes and digests that are proven bad, in segments that are marked.

        It builds them from the keys in the packs, without the model, and unmarks chunks that are
        good again; look the prefix up again afterwards.

        Args:
          prefix: a prefix found by `longest_prefix(marked=True)`.
          codec: the codec that its layout names.

        Returns:
          The number of chunks of probes and layers of digests that were repaired.

        Raises:
          StoreUnavailable: another process is repairing a segment, or the disk did not answer.
          SegmentDamaged: a segment is gone, or another process has just repaired it.
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
        """Opens a span's segment and locks it for repair."""
        segment = self._segments.acquire(span)
        try:
            alone = self.files.repairing(span.segment_id)
            try:
                self.index.manifest(span.segment_id, span.checksum)  # no other repair was faster
                yield segment
            finally:
                alone.release()
        finally:
            self._segments.release([segment])

    # -- reading ---------------------------------------------------------------------------------

    def reader(
        self, prefix: Prefix, *, deadline_s: float | None = None, lazily: bool = False
    ) -> PrefixReader:
        """Opens a prefix for reading; its segments are not evicted before the reader is closed.

        A segment that is gone or cannot be opened reads as missing packs, never as an error.

        Args:
          prefix: a stored prefix.
          deadline_s: seconds for each call of the reader; None: `StoreConfig.deadline_s`.
          lazily: open the segments at the first read; until then they may be evicted.
        """
        self._check_open()
        return PrefixReader(
            prefix,
            (lambda: self._opened(prefix)) if lazily else self._opened(prefix),
            deadline_s=self.config.deadline_s if deadline_s is None else deadline_s,
            gate=self.gate,
            proof=self._proof,
            count=self._counts.add,
            release=self._segments.release,
        )

    def _opened(self, prefix: Prefix) -> Sequence[Opened]:
        """Opens the segments of a prefix; returns an error for each if the disk does not answer."""

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
        """Records a use of a prefix from which nothing is read."""
        if self.bounds.touch(prefix) and not self._closed:
            with contextlib.suppress(StoreUnavailable):
                self._run("noting times of use", self.bounds.flush)

    def open_segment(self, manifest: Manifest, checksum: str) -> Segment:
        """Opens a published segment as a plain zarr reader would, by the indexes of its shards.

        The caller closes it. Raises SegmentDamaged if it is gone, StoreUnavailable if the disk does
        not answer.
        """
        place = dataclasses.replace(self._place, queues=None)
        return self._run(
            "opening a segment",
            lambda: Segment(manifest, checksum, place),
            late=lambda segment: segment.close(),
        )

    def segment_reader(self, prefix: Prefix, segment: Segment, report: Report) -> PrefixReader:
        """Creates a reader over an opened segment that reports faults to `report`, not to the
        store. The reader closes the segment."""
        return PrefixReader(
            prefix,
            [segment],
            deadline_s=self.config.deadline_s,
            gate=self.gate,
            proof=Proof(report, self._place.disk_timeout),
            count=lambda _: None,
            release=lambda _: segment.close(),
        )

    # -- scores, bounds --------------------------------------------------------------------------

    def save_scores(self, segment_id: str, importance: np.ndarray, frequency: np.ndarray) -> None:
        """Saves a segment's cache scores: importance float32 and frequency uint32, [groups, M]."""
        importance = np.ascontiguousarray(importance, np.float32)
        frequency = np.ascontiguousarray(frequency, np.uint32)
        if importance.ndim != 2 or importance.shape != frequency.shape:
            raise ValueError(
                f"scores: got {importance.shape} and {frequency.shape}, expected one [groups, M]"
            )
        scores = np.nan_to_num(importance), frequency
        self._run("saving scores", lambda: self.index.catalog.save_scores(segment_id, *scores))

    def load_scores(self, segment_id: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Loads a segment's importance, float32 [groups, M], and frequency, uint32 [groups, M];
        None if none were saved."""

        def work() -> tuple[np.ndarray, np.ndarray] | None:
            found, loaded = self.index.catalog.load_scores(segment_id), self.index.load(segment_id)
            if found is None or loaded is None:
                return None
            shape = (loaded.manifest.layout.groups, loaded.manifest.chunks)
            return found if found[0].shape == found[1].shape == shape else None

        return self._run("loading scores", work)

    def set_record(self, prefix_id: str, record: PrefixRecord, *, salt: str | None = None) -> str:
        """Writes the record of a prefix, given by its id or the start of it; returns the whole id.

        Raises PrefixNotFound; StoreUnavailable if an eviction keeps the prefix from being pinned.
        """
        end = time.monotonic() + self.config.wait_s / 2

        def work() -> str:
            while True:
                found = self.index.prefix(prefix_id, salt)
                ids = [span.segment_id for span in found.spans if record.pinned]
                try:
                    with contextlib.ExitStack() as held:  # no eviction misses the pin
                        for id_ in ids:
                            held.callback(self.files.hold(id_).release)
                        before = self.bounds.record_of(found.id)
                        self.bounds.set_record(found.id, record)
                        if self.files.holding or all(self.index.find(i, again=True) for i in ids):
                            return found.id
                        self.bounds.set_record(found.id, before)  # an eviction came first
                except SegmentDamaged as e:  # an eviction has claimed it: it goes now, or stays
                    if time.monotonic() > end:
                        raise StoreUnavailable(f"prefix {found.id} is being evicted") from e
                    time.sleep(0.01)

        return self._run("noting a record", work)

    def records(self, *, salt: str | None = None) -> dict[str, PrefixRecord]:
        """Returns the records of prefixes, by id; `salt` None: of all tenants."""
        whose = None if salt is None else chain.tenant_mark(salt)
        return self._run("reading records", lambda: self.bounds.records(whose))

    def sizes(self, *, salt: str | None = None) -> dict[str, tuple[int, float]]:
        """Returns (bytes, time of last use in seconds since the epoch) of each segment, by id;
        `salt` None: of all tenants."""
        whose = None if salt is None else chain.tenant_mark(salt)
        found = self._run("adding up", lambda: self.index.catalog.entries(whose))
        return {e.id: (e.bytes, e.used) for e in found}

    def record_of(self, prefix: Prefix) -> PrefixRecord:
        """Returns the record of one prefix."""
        return self._run("reading a record", lambda: self.bounds.record_of(prefix.id))

    def evict_to(self, max_bytes: int) -> int:
        """Evicts whole segments until at most `max_bytes` are used; returns the bytes freed."""
        seconds = self.config.write_s
        return self._run("evicting", lambda: self.bounds.evict_to(max_bytes), seconds=seconds)

    def evict_expired(self) -> int:
        """Evicts prefixes whose `retain_s` has passed; returns the bytes freed."""
        return self._run("evicting", self.bounds.evict_expired, seconds=self.config.write_s)

    def delete(self, prefix: Prefix) -> int:
        """Removes a stored prefix, each copy of it, and its continuations; returns the bytes freed.

        Segments that other prefixes need, that are in use or that another pinned prefix needs stay.
        So do shorter prefixes that end in an earlier segment and have a record of their own. If the
        prefix ends inside of a segment, the rest of that segment is removed too. Of a reordered
        prefix only this order goes. The record of a prefix that stays is unchanged.

        Raises `StoreError`, and removes nothing, if the index is damaged and names a continuation
        of a segment as its parent. `ckv verify STORE --repair` repairs the index.
        """
        return self._run(
            "deleting", lambda: self.bounds.delete(prefix), seconds=self.config.write_s
        )

    def remove_segment(self, segment_id: str) -> bool:
        """Removes one segment without continuations; returns False if it is being read."""
        return self._run(
            "deleting",
            lambda: self.bounds.remove(segment_id, "deleted by its owner: its text has ended"),
            seconds=self.config.write_s,
        )

    def usage(self) -> int:
        """Returns the bytes on disk of all segments, plus the bytes reserved by running writers."""
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
        """Runs work on the disk with a time limit; raises StoreClosed, StoreUnavailable."""
        self._check_open()

        def there() -> T:
            self.files.require()
            return work()

        return self._place.disk_timeout.run(what, there, seconds=seconds, late=late)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def close(self) -> None:
        """Closes the store; open readers stay usable. Idempotent."""
        if self._closed:
            return
        self._closed = True

        def work() -> None:
            with contextlib.suppress(StoreUnavailable):
                self.files.require()  # else an index would be made where the store was
                self.bounds.flush()
            self.index.catalog.db.close()

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
