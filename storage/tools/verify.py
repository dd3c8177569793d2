"""Reading everything there is, and saying what is not as it was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckv_jax.storage.errors import ReadTimeout, SegmentDamaged
from ckv_jax.storage.index import lookup
from ckv_jax.storage.index.lookup import Loaded
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.segment import Segment
from ckv_jax.storage.store import ChunkStore

_PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was written.

    Attributes:
      segment_id: where.
      chunk: the first bad chunk within the segment; 0 when nothing of it can be served.
      what: what was found.
    """

    segment_id: str
    chunk: int
    what: str


@dataclass(slots=True)
class VerifyReport:
    """What `verify_store` found and did.

    Attributes:
      segments, packs, bytes: how much was checked.
      damages: all that is damaged.
      unindexed: segments that the index lacked, or had although they were gone.
      removed: segments that the repair removed, as no chunk of them could be served.
      quarantined: segments that the repair limited to their good chunks.
      pardoned: segments that were marked as bad and are whole.
      swept: what killed writers had left.
    """

    segments: int = 0
    packs: int = 0
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    unindexed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    pardoned: list[str] = field(default_factory=list)
    swept: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not self.damages and not self.unindexed

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def verify_store(
    store: ChunkStore,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every pack, probe, digest and manifest of a store.

    Args:
      store: an open store.
      repair: remove what cannot be served, limit segments to their good chunks, lift marks from
        whole ones, rebuild the index and sweep what killed writers left.
      progress: called with (bytes checked, bytes in all).
    """
    report = VerifyReport()
    ids = sorted(store.files.segment_ids())
    indexed = {e.id for e in store.index.catalog.entries()}
    report.unindexed = sorted(indexed.symmetric_difference(ids))
    known = list(store.index.describe(ids))
    report.damages += [
        Damage(id_, 0, "the manifest is missing or damaged")
        for id_ in sorted(set(ids) - {manifest.segment_id for manifest, _, _ in known})
    ]
    total = sum(size for _, _, size in known)
    usable: dict[str, Loaded] = {}
    for manifest, checksum, size in known:
        damages = _check(store, manifest, checksum, report)
        report.damages += damages
        report.segments += 1
        report.bytes += size
        chunks = min((d.chunk for d in damages), default=manifest.chunks)
        usable[manifest.segment_id] = Loaded(manifest, checksum, chunks)
        if progress is not None:
            progress(report.bytes, total)
    orphans = _orphans(usable)
    report.damages += [Damage(id_, 0, "what it continues is gone or damaged") for id_ in orphans]
    if repair:
        _repair(store, report, usable)
    return report


def _check(
    store: ChunkStore, manifest: Manifest, checksum: str, report: VerifyReport
) -> list[Damage]:
    """Read all of one segment through a reader of its own, so that nothing is quarantined yet."""
    id_, layout, chunks = manifest.segment_id, manifest.layout, manifest.chunks
    damages: list[Damage] = []
    try:
        segment = store.open_segment(manifest, checksum)
    except SegmentDamaged as e:
        return [Damage(id_, 0, str(e))]
    span = Span(
        segment_id=id_, first_chunk=0, num_chunks=chunks, segment_chunks=chunks, checksum=checksum
    )
    whole = Prefix(
        id=manifest.links[-1].hex(),
        tokens=manifest.tokens,
        spans=(span,),
        layout=layout,
        fingerprint=manifest.fingerprint,
    )

    def note(_: Segment | None, chunk: int, reason: str) -> None:
        damages.append(Damage(id_, chunk, reason))

    with PrefixReader(
        whole,
        [segment],
        deadline_s=store.config.deadline_s,
        gate=store.gate,
        report=note,
        release=lambda _: segment.close(),
        digests=lambda _, load: load(),
    ) as reader:
        try:
            step = max(1, _PIECE_BYTES // layout.pack_bytes)
            out = np.empty((min(step, chunks), *layout.pack_shape), layout.numpy_dtype)
            for group in range(layout.groups):
                for first in range(0, chunks, step):
                    ids = np.arange(first, min(first + step, chunks))
                    reader.read_packs(group, ids, out[: len(ids)])
                    report.packs += len(ids)
            shape = (len(manifest.tokens), layout.probe_heads, layout.head_dim)
            for layer in layout.probe_layers:
                reader.read_probe(layer, np.empty(shape, layout.numpy_dtype))
            reader.read_digest()
        except ReadTimeout as e:
            damages.append(Damage(id_, 0, str(e)))
    return damages


def _orphans(segments: dict[str, Loaded]) -> list[str]:
    """Segments that continue something that cannot be served up to where they start."""
    found = []
    for id_, loaded in segments.items():
        parent = segments.get(loaded.manifest.parent or "")
        try:
            lookup.resolve(loaded, loaded.manifest.chunks, segments.get)
        except SegmentDamaged:
            found.append(id_)
            continue
        while parent is not None:
            start = loaded.manifest.first_chunk - parent.manifest.first_chunk
            if start > parent.usable:
                found.append(id_)
                break
            loaded, parent = parent, segments.get(parent.manifest.parent or "")
    return found


def _repair(store: ChunkStore, report: VerifyReport, segments: dict[str, Loaded]) -> None:
    first: dict[str, Damage] = {}
    for damage in sorted(report.damages, key=lambda d: -d.chunk):
        first[damage.segment_id] = damage
    for id_, damage in first.items():
        if damage.chunk == 0 and store.bounds.remove(id_):
            report.removed.append(id_)
        elif id_ in segments:
            store.index.quarantine(id_, segments[id_].checksum, damage.chunk, damage.what)
            report.quarantined.append(id_)
    for id_, loaded in segments.items():
        if id_ not in first and store.index.catalog.quarantined(id_, loaded.checksum):
            store.index.pardon(id_)
            report.pardoned.append(id_)
    report.swept = store.files.sweep()
    store.index.catalog.rebuild()
