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
from ckv_jax.storage.prefix import Prefix, ProbePages
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.segment import Segment
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.tools.damage import (
    Damage,
    RepairOutcome,
    VerifyReport,
    by_segment,
    expected_outcome,
    planned_repairs,
    ranges,
    repair_outcome,
)

_PIECE_BYTES = 32 << 20


def verify_store(
    store: ChunkStore,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every pack, probe, digest and manifest of a store.

    Args:
      store: an open store.
      repair: make probes and digests again, remove what is proven to be of no use, limit segments
        to their good chunks, lift marks from whole ones, rebuild the index and sweep what killed
        writers left. What could not be read stays as it is, and what could not be made again stays.
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
    total = sum(size for _, _, size in known)
    segments: dict[str, Loaded] = {}
    for manifest, checksum, size in known:
        damages, unread = _check(store, manifest, checksum, report)
        report.damages += damages
        report.unread += unread
        report.segments += 1
        report.bytes += size
        segments[manifest.segment_id] = Loaded(manifest, checksum, manifest.chunks)
        if progress is not None:
            progress(report.bytes, total)
    outcomes: dict[str, RepairOutcome] = {}
    for id_, found in sorted(by_segment(report.damages).items()):
        if repair:
            outcomes[id_] = _try_rebuild(store, report, segments, id_, found)
        else:
            outcomes[id_] = expected_outcome(
                segments[id_].manifest if id_ in segments else None, found
            )
    unknown = {d.segment_id for d in report.unread}
    unknown.update(report.foreign, report.unfinished)
    for id_ in _orphans(segments, outcomes, unknown):
        orphaned = Damage(id_, 0, "what it continues is gone or damaged", "parent")
        report.damages.append(orphaned)
        outcomes[id_] = repair_outcome(segments[id_].manifest, [orphaned], [orphaned], True)
    if repair:
        _repair(store, report, segments, outcomes)
        store.bounds.sweep()
    return report


def _check(
    store: ChunkStore, manifest: Manifest, checksum: str, report: VerifyReport
) -> tuple[list[Damage], list[Damage]]:
    """Read all of one segment, marking nothing.

    Returns (what is damaged, what could not be read).
    """
    id_, layout, chunks = manifest.segment_id, manifest.layout, manifest.chunks
    damages: list[Damage] = []
    unread: list[Damage] = []
    kind = "packs"
    try:
        segment = store.open_segment(manifest, checksum)
    except SegmentDamaged as e:
        return [Damage(id_, 0, str(e), "segment")], []
    except StoreUnavailable as e:
        return [], [Damage(id_, 0, str(e), "segment")]
    whole = _alone(manifest, checksum)

    def note(_: Segment | None, chunk: int, reason: str, proof: bool) -> None:
        (damages if proof else unread).append(Damage(id_, chunk, reason, kind))

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
            for layer in layout.probe_layers:
                _read_probe(reader, layer)
        except (ReadTimeout, StoreUnavailable) as e:  # a buffer is given up with it
            unread.append(Damage(id_, 0, str(e), kind))
        else:
            kind = "digest"
            found = reader.read_digest()
            if found is None and layout.digest != "none" and not (damages or unread):
                unread.append(Damage(id_, 0, "digest: not read", kind))
    return damages, unread


def _read_probe(reader: PrefixReader, layer: int) -> None:
    """Read the whole probe of a layer; what of it is bad is reported as it is found."""
    layout = reader.prefix.layout
    pages = ProbePages(reader.prefix, layout.probe_block(reader.prefix.num_chunks))
    size = pages.most * layout.chunk_tokens * pages.token_bytes
    out = np.empty((min(max(1, _PIECE_BYTES // size), len(pages)), size), np.uint8)
    for first in range(0, len(pages), len(out)):
        ids = np.arange(first, min(first + len(out), len(pages)))
        reader.read_probe_pages(layer, pages, ids, out[: len(ids)])


def _alone(manifest: Manifest, checksum: str) -> Prefix:
    """One segment as if it were a prefix, whatever it continues."""
    return Prefix(
        id=manifest.links[-1].hex(),
        tokens=manifest.tokens,
        spans=(manifest.span(checksum),),
        layout=manifest.layout,
        fingerprint=manifest.fingerprint,
    )


def _orphans(
    segments: dict[str, Loaded], outcomes: dict[str, RepairOutcome], unknown: set[str]
) -> list[str]:
    """Segments that continue something that will not be there up to where they start.

    Not those whose line leads through something `unknown`.
    """
    found = []
    for id_, loaded in segments.items():
        line = list(_line(loaded, segments))
        if unknown & set(line):
            continue
        try:
            lookup.resolve(loaded, loaded.manifest.chunks, segments.get)
        except SegmentDamaged:
            found.append(id_)
            continue
        for parent in line:
            start = loaded.manifest.first_chunk - segments[parent].manifest.first_chunk
            after = outcomes.get(parent)
            if after is not None and not after.kept and start > after.usable:
                found.append(id_)
                break
            loaded = segments[parent]
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


def _try_rebuild(
    store: ChunkStore,
    report: VerifyReport,
    segments: dict[str, Loaded],
    id_: str,
    found: list[Damage],
) -> RepairOutcome:
    """Make a segment's bad probes and digests again; returns what becomes of it."""
    if id_ not in segments:
        return repair_outcome(None, found, found, False)
    manifest, left, tried = segments[id_].manifest, found, None
    if all(d.kind != "segment" for d in found):
        try:
            tried = _rebuilt(store, segments[id_], found)
        except SegmentDamaged as e:
            gone = Damage(id_, 0, str(e), "segment")
            report.damages.append(gone)
            found.append(gone)
        except StoreError:
            pass
    if tried is not None:
        segments[id_] = tried
        left = [d for d in found if d.chunk >= tried.usable]
    return repair_outcome(manifest, found, left, tried is not None)


def _rebuilt(store: ChunkStore, loaded: Loaded, found: list[Damage]) -> Loaded | None:
    """A segment after its bad probes and digests were made again, or None: its codec is unknown."""
    manifest, checksum, id_ = loaded.manifest, loaded.checksum, loaded.manifest.segment_id
    if not known(manifest.layout):
        return None  # its packs cannot be read here
    for damage in found:
        store.index.quarantine(id_, checksum, damage.chunk, damage.what)
    store.rebuild_probes(_alone(manifest, checksum), codec=codec_of(manifest.layout))
    after = store.index.find(id_)
    if after is None:
        raise SegmentDamaged(f"segment {id_}: gone")
    return after


def _repair(
    store: ChunkStore,
    report: VerifyReport,
    segments: dict[str, Loaded],
    outcomes: dict[str, RepairOutcome],
) -> None:
    """Give up what is of no use any more, mark what stays bad, lift marks from what is whole."""
    for id_, after in outcomes.items():
        alike = id_ in segments and segments[id_].manifest.layout.alike
        if not after.why:
            report.remade.append(id_)
            continue
        if after.kept and not (alike and after.served):
            report.unrepaired.append(id_)
        if after.removed and store.bounds.remove(id_, f"repair: {after.why}"):
            report.removed.append(id_)
        elif id_ in segments:
            store.index.quarantine(id_, segments[id_].checksum, after.usable, after.why)
            report.quarantined.append(id_)
    unread = {d.segment_id for d in report.unread}
    for id_, loaded in segments.items():
        if (
            (id_ not in outcomes or not outcomes[id_].why)
            and id_ not in unread
            and store.index.catalog.quarantined(id_, loaded.checksum)
        ):
            store.index.pardon(id_)
            report.pardoned.append(id_)
    report.swept = store.files.sweep()
    store.index.catalog.rebuild()
