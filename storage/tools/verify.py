"""Reading everything there is, saying what is not as it was written, and what a repair makes of
it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from ckv_jax.storage.index.index import Loaded, resolve
from ckv_jax.storage.prefix import Prefix, PrefixRecord, ProbePages
from ckv_jax.storage.segment.manifest import Manifest, servable
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
      kind: of what: "manifest", "packs", "assignment", "probe", "digest"; "parent" where what it
        continues is gone; "segment" where it could not be opened.
    """

    segment_id: str
    chunk: int
    what: str
    kind: str = "packs"


@dataclass(slots=True)
class VerifyReport:
    """What `verify_store` found and did.

    Attributes:
      segments, packs, bytes: how much was checked.
      damages: all that is proven to be damaged.
      unread: what could not be read in time, or at all just now; it may be whole.
      foreign: segments of another version of the format, or another key; they are left alone.
      unfinished: objects of an object store without a manifest, being uploaded now or left by a
        writer that was killed; they are left alone.
      unindexed: segments that the index lacked, or had although they were gone.
      remade: segments whose probes or digests the repair made again, and that are whole now.
      unrepaired: damaged segments that could not be made whole just now, or not here, and may be
        later, such as those of alike tokens by the next ingest; they are kept, and not served.
      removed: segments that the repair removed, as no chunk of them could be served.
      quarantined: segments that the repair limited to their good chunks.
      pardoned: segments that were marked as bad and are whole.
      swept: what killed writers had left.
    """

    segments: int = 0
    packs: int = 0
    bytes: int = 0
    damages: list[Damage] = field(default_factory=list)
    unread: list[Damage] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    unindexed: list[str] = field(default_factory=list)
    remade: list[str] = field(default_factory=list)
    unrepaired: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    pardoned: list[str] = field(default_factory=list)
    swept: int = 0

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not (self.damages or self.unindexed or self.unread)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def by_segment(damages: Iterable[Damage]) -> dict[str, list[Damage]]:
    """What was found, of each segment."""
    found: dict[str, list[Damage]] = {}
    for damage in damages:
        found.setdefault(damage.segment_id, []).append(damage)
    return found


def ranges(damages: Sequence[Damage]) -> list[str]:
    """What was found, a line for each run of neighbouring chunks of one segment."""
    chunks: dict[str, set[int]] = {}
    first: dict[str, str] = {}
    for damage in damages:
        chunks.setdefault(damage.segment_id, set()).add(damage.chunk)
        first.setdefault(damage.segment_id, damage.what)
    lines = []
    for id_, bad in chunks.items():
        runs: list[list[int]] = []
        for chunk in sorted(bad):
            if runs and runs[-1][1] == chunk - 1:
                runs[-1][1] = chunk
            else:
                runs.append([chunk, chunk])
        said = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:8])
        more = f" and {len(runs) - 8} more runs" if len(runs) > 8 else ""
        word = "chunk" if len(bad) == 1 else f"{len(bad)} chunks:"
        lines.append(f"{id_}, {word} {said}{more}: {first[id_]}")
    return lines


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """What a repair leaves of a segment.

    Attributes:
      usable: chunks before the first one that stays bad.
      served: how many of them can be served, see `servable`.
      kept: what is not served may be made whole later, by an ingest of its text or another repair:
        neither the segment nor what continues it is removed.
      why: what was found at the first chunk that stays bad; empty where none does.
    """

    usable: int
    served: int
    kept: bool
    why: str

    @property
    def removed(self) -> bool:
        """Whether nothing of the segment is of any use."""
        return bool(self.why) and not (self.served or self.kept)


def repair_outcome(
    manifest: Manifest | None, found: Sequence[Damage], left: Sequence[Damage], tried: bool
) -> RepairOutcome:
    """What becomes of a segment.

    Args:
      manifest: its manifest; None: it cannot be read.
      found: all that is damaged.
      left: what of that stays so after probes and digests were made again.
      tried: whether they could be; else another time may do.
    """
    why = min(left, key=lambda d: d.chunk).what if left else ""
    if manifest is None:
        return RepairOutcome(0, 0, False, why)
    chunks = manifest.chunks
    usable = min((d.chunk for d in left), default=chunks)
    torn = {d.chunk for d in found if d.kind == "packs"}
    if not left or any(d.kind in ("segment", "parent") for d in left):
        kept = False  # nothing to wait for: no ingest writes into what cannot be opened
    elif manifest.layout.alike:  # of use as a whole, which the next ingest of its text makes it
        kept = len(torn) < chunks
    else:
        kept = not torn if tried else usable < min(torn, default=chunks)
    return RepairOutcome(usable, servable(manifest, usable), kept, why)


def expected_outcome(manifest: Manifest | None, found: Sequence[Damage]) -> RepairOutcome:
    """The same before anything is made again: as far as the disk does not fail it, and no other
    process is repairing."""
    if manifest is None or not known(manifest.layout):
        return repair_outcome(manifest, found, found, False)
    torn = {d.chunk for d in found if d.kind == "packs"}
    return repair_outcome(manifest, found, [d for d in found if not _follows(d, torn)], True)


def _follows(damage: Damage, torn: set[int]) -> bool:
    """Whether what is damaged can be made again from packs, of which chunks are `torn`."""
    if damage.kind == "digest":
        return not torn
    return damage.kind == "probe" and damage.chunk not in torn


def planned_repairs(store: ChunkStore, report: VerifyReport) -> list[str]:
    """What a repair would do for each segment that `verify_store` found damaged, changing nothing.

    As far as the disk does not fail it, and no other process is repairing.
    """
    said = store.records()
    lines = []
    for id_, found in by_segment(report.damages).items():
        loaded = store.index.find(id_)
        manifest = None if loaded is None else loaded.manifest
        ends = "" if manifest is None else manifest.links[-1].hex()
        record = said.get(ends, PrefixRecord())
        about = f" ({record.name or record.begins})" if record.name or record.begins else ""
        lines.append(f"{id_}{about}: {_in_words(manifest, expected_outcome(manifest, found))}")
    return lines


def _in_words(manifest: Manifest | None, outcome: RepairOutcome) -> str:
    if manifest is None or outcome.removed:
        return "be removed"
    if not outcome.why:
        return "be made whole: what is damaged follows from its packs"
    if not outcome.served:
        return "be kept and not served, until its text is ingested again"
    return f"be limited to its first {outcome.served} of {manifest.chunks} chunks"


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
            resolve(loaded, loaded.manifest.chunks, segments.get)
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
