"""Reading everything there is, and saying what is not as it was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ckv_jax.storage.codec import codec_of, known
from ckv_jax.storage.errors import (
    ReadTimeout,
    SegmentDamaged,
    SegmentForeign,
    SegmentUnfinished,
    StoreError,
    StoreUnavailable,
)
from ckv_jax.storage.index import lookup
from ckv_jax.storage.index.lookup import Loaded
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.manifest import Manifest, servable
from ckv_jax.storage.segment.segment import Segment
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.tools.damage import Damage, VerifyReport, ranges
from ckv_jax.storage.tools.losses import losses, mendable
from ckv_jax.storage.writing import whole_span

__all__ = ["Damage", "VerifyReport", "losses", "ranges", "verify_store"]

_PIECE_BYTES = 32 << 20


def verify_store(
    store: ChunkStore,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every pack, probe, digest and manifest of a store.

    Args:
      store: an open store.
      repair: make probes and digests anew, remove what is proven to be of no use, limit segments
        to their good chunks, lift marks from whole ones, rebuild the index and sweep what killed
        writers left. What could not be read stays as it is, and what could not be made anew stays.
      progress: called with (bytes checked, bytes in all).

    Raises:
      StoreUnavailable: the store cannot be listed.
    """
    report = VerifyReport()
    ids = sorted(store.files.segment_ids())
    known: list[tuple[Manifest, str, int]] = []
    for id_, manifest, checksum, size in store.index.manifests(ids):
        if isinstance(manifest, Manifest):
            known.append((manifest, checksum, size))
        elif isinstance(manifest, SegmentForeign):
            report.foreign.append(id_)
        elif isinstance(manifest, SegmentUnfinished):
            report.unfinished.append(id_)
        elif isinstance(manifest, SegmentDamaged):
            report.damages.append(Damage(id_, 0, "the manifest is missing or damaged", "manifest"))
        else:
            report.unread.append(Damage(id_, 0, str(manifest), "manifest"))
    # Of what the index lacks, only what could be in it counts.
    indexed = {e.id for e in store.index.catalog.entries()}
    lacking = {manifest.segment_id for manifest, _, _ in known} - indexed
    report.unindexed = sorted(lacking | (indexed - set(ids)))
    torn: dict[str, set[int]] = {}  # chunks with packs that are proven bad
    total = sum(size for _, _, size in known)
    usable: dict[str, Loaded] = {}
    for manifest, checksum, size in known:
        damages, unread, torn[manifest.segment_id] = _check(store, manifest, checksum, report)
        report.damages += damages
        report.unread += unread
        report.segments += 1
        report.bytes += size
        chunks = min((d.chunk for d in damages), default=manifest.chunks)
        usable[manifest.segment_id] = Loaded(manifest, checksum, chunks)
        if progress is not None:
            progress(report.bytes, total)
    if repair:
        _remake(store, report, usable, torn)
    left = [
        d
        for d in report.damages
        if d.segment_id not in usable or d.chunk >= usable[d.segment_id].usable  # else it is mended
    ]
    unknown = {d.segment_id for d in report.unread}
    unknown.update(report.foreign, report.unfinished, report.unrepaired)
    orphans = _orphans(usable, unknown)
    gone = "what it continues is gone or damaged"
    orphaned = [Damage(id_, 0, gone, "parent") for id_ in orphans]
    report.damages += orphaned
    if repair:
        _repair(store, report, usable, left + orphaned)
    return report


def _check(
    store: ChunkStore, manifest: Manifest, checksum: str, report: VerifyReport
) -> tuple[list[Damage], list[Damage], set[int]]:
    """Read all of one segment, marking nothing.

    Returns (what is damaged, what could not be read, chunks with packs that are proven bad).
    """
    id_, layout, chunks = manifest.segment_id, manifest.layout, manifest.chunks
    damages: list[Damage] = []
    unread: list[Damage] = []
    torn: set[int] = set()
    kind = "packs"
    try:
        segment = store.open_segment(manifest, checksum)
    except SegmentDamaged as e:
        return [Damage(id_, 0, str(e), "segment")], [], {0}
    except StoreUnavailable as e:
        return [], [Damage(id_, 0, str(e), "segment")], torn
    whole = _alone(manifest, checksum)

    def note(_: Segment | None, chunk: int, reason: str, proof: bool) -> None:
        (damages if proof else unread).append(Damage(id_, chunk, reason, kind))
        if proof and kind == "packs":
            torn.add(chunk)

    with store.segment_reader(whole, segment, note) as reader:
        step = max(1, _PIECE_BYTES // layout.stored_bytes)
        out = np.empty((min(step, chunks), *layout.stored_shape), layout.stored_dtype)
        try:
            for group in range(layout.groups):
                for first in range(0, chunks, step):
                    ids = np.arange(first, min(first + step, chunks))
                    reader.read_packs(group, ids, out[: len(ids)])
                    report.packs += len(ids)
            if layout.alike:
                kind = "assignment"
                reader.lost_orders()  # which notes them
            kind = "probe"
            shape = (len(manifest.tokens), layout.probe_heads, layout.head_dim)
            for layer in layout.probe_layers:
                reader.read_probe(layer, np.empty(shape, layout.numpy_dtype))
        except (ReadTimeout, StoreUnavailable) as e:  # a buffer is given up with it
            unread.append(Damage(id_, 0, str(e), kind))
        else:
            kind = "digest"
            found = reader.read_digest()
            if found is None and layout.digest != "none" and not (damages or unread):
                unread.append(Damage(id_, 0, "digest: not read", kind))
    return damages, unread, torn


def _alone(manifest: Manifest, checksum: str) -> Prefix:
    """One segment as if it were a prefix, whatever it continues."""
    return Prefix(
        id=manifest.links[-1].hex(),
        tokens=manifest.tokens,
        spans=(whole_span(manifest, checksum),),
        layout=manifest.layout,
        fingerprint=manifest.fingerprint,
    )


def _orphans(segments: dict[str, Loaded], unknown: set[str]) -> list[str]:
    """Segments that continue something that cannot be served up to where they start.

    Not those whose line leads through something `unknown`.
    """
    found = []
    for id_, loaded in segments.items():
        if unknown & set(_line(loaded, segments)):
            continue
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


def _line(loaded: Loaded, segments: dict[str, Loaded]) -> Iterator[str]:
    """Ids of what a segment continues, up to the first that is not there."""
    seen: set[str] = set()
    while (id_ := loaded.manifest.parent) is not None and id_ not in seen:
        seen.add(id_)
        yield id_
        if id_ not in segments:
            return
        loaded = segments[id_]


def _remake(
    store: ChunkStore,
    report: VerifyReport,
    segments: dict[str, Loaded],
    torn: dict[str, set[int]],
) -> None:
    """Make bad probes and digests anew; notes the segments that are whole again.

    And those that are not, though no pack of theirs is proven to be why: making them anew may work
    another time. And those of alike tokens that the next ingest makes whole.
    """
    for id_ in sorted({d.segment_id for d in report.damages} & segments.keys()):
        loaded = segments[id_]
        why = min(torn[id_], default=loaded.manifest.chunks)
        try:
            tried = _remade(store, report, loaded)
        except SegmentDamaged:
            continue  # it is gone, or cannot even be opened
        except StoreError:
            tried = None
        if tried is not None:
            segments[id_] = tried
        if tried is not None and tried.usable == loaded.manifest.chunks:
            report.remade.append(id_)
        elif loaded.manifest.layout.alike:
            left = servable(loaded.manifest, (tried or loaded).usable)
            if not left and mendable(loaded.manifest, torn[id_]):
                report.unrepaired.append(id_)
        elif (why > loaded.usable) if tried is None else not torn[id_]:
            report.unrepaired.append(id_)


def _remade(store: ChunkStore, report: VerifyReport, loaded: Loaded) -> Loaded | None:
    """A segment after its bad probes and digests were made anew, or None: nobody here can."""
    manifest, checksum, id_ = loaded.manifest, loaded.checksum, loaded.manifest.segment_id
    if not known(manifest.layout):
        return None  # its packs cannot be read here
    for damage in report.damages:
        if damage.segment_id == id_:
            store.index.quarantine(id_, checksum, damage.chunk, damage.what)
    store.remake_probes(_alone(manifest, checksum), codec=codec_of(manifest.layout))
    found = store.index.find(id_)
    if found is None:
        raise SegmentDamaged(f"segment {id_}: gone")
    return found


def _repair(
    store: ChunkStore, report: VerifyReport, segments: dict[str, Loaded], damages: list[Damage]
) -> None:
    """Give up what is of no use because of `damages`, which are those that are left."""
    first: dict[str, Damage] = {}
    for damage in sorted(damages, key=lambda d: -d.chunk):
        first[damage.segment_id] = damage
    for id_, damage in first.items():
        served = servable(segments[id_].manifest, damage.chunk) if id_ in segments else 0
        useless = not served and id_ not in report.unrepaired
        if useless and store.bounds.remove(id_, f"repair: {damage.what}"):
            report.removed.append(id_)
        elif id_ in segments:
            store.index.quarantine(id_, segments[id_].checksum, damage.chunk, damage.what)
            report.quarantined.append(id_)
    unread = {d.segment_id for d in report.unread}
    for id_, loaded in segments.items():
        if (
            id_ not in first
            and id_ not in unread
            and store.index.catalog.quarantined(id_, loaded.checksum)
        ):
            store.index.pardon(id_)
            report.pardoned.append(id_)
    report.swept = store.files.sweep()
    store.index.catalog.rebuild()
