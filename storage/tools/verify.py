"""Verification and repair of a store: reads all segments, reports damage, and plans or makes
repairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    """One piece of a segment that is damaged or could not be read.

    Attributes:
      segment_id: id of the segment.
      chunk: the first bad chunk within the segment; 0 when no chunk of it can be served.
      what: the fault, as a message.
      kind: the damaged piece: "manifest", "packs", "assignment", "probe" or "digest"; "parent"
        where the segment that it continues is gone; "segment" where it could not be opened.
    """

    segment_id: str
    chunk: int
    what: str
    kind: str = "packs"


@dataclass(slots=True)
class VerifyReport:
    """Findings and repairs of `verify_store`.

    Attributes:
      segments, packs, bytes: how much was checked.
      damages: all proven damage.
      unread: pieces that could not be read now; they may be undamaged.
      foreign: segments of another format version or another key; they are not changed.
      unfinished: segments of an object store without a manifest, being uploaded now or left by a
        writer that was killed; they are not changed.
      unindexed: segments that the index lacks, has although they are gone from the disk, or has
        with another parent than their manifest names.
      remade: segments that are complete again, after the repair rebuilt their probes or digests.
      unrepaired: damaged segments that a later ingest or repair may restore, such as those of
        clustered tokens; they are kept and not served.
      removed: segments that the repair removed because no chunk of them could be served.
      quarantined: segments that the repair limited to their good chunks.
      pardoned: undamaged segments whose quarantine mark was removed.
      swept: number of files of killed writers that were removed.
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
        """Whether all data was read and is undamaged, and the index agrees with the disk."""
        return not (self.damages or self.unindexed or self.unread)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a JSON object."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def by_segment(damages: Iterable[Damage]) -> dict[str, list[Damage]]:
    """Groups damages by segment id."""
    found: dict[str, list[Damage]] = {}
    for damage in damages:
        found.setdefault(damage.segment_id, []).append(damage)
    return found


def ranges(damages: Sequence[Damage]) -> list[str]:
    """Describes damages, one line per segment, with runs of neighbouring chunks."""
    lines = []
    for id_, mine in by_segment(damages).items():
        bad = {damage.chunk for damage in mine}
        runs: list[list[int]] = []
        for chunk in sorted(bad):
            if runs and runs[-1][1] == chunk - 1:
                runs[-1][1] = chunk
            else:
                runs.append([chunk, chunk])
        said = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:8])
        more = f" and {len(runs) - 8} more runs" if len(runs) > 8 else ""
        word = "chunk" if len(bad) == 1 else f"{len(bad)} chunks:"
        lines.append(f"{id_}, {word} {said}{more}: {mine[0].what}")
    return lines


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """The state of a segment after a repair.

    Attributes:
      usable: chunks before the first one that stays bad.
      served: how many of them can be served, see `servable`.
      kept: whether an ingest of the text or another repair may still restore the chunks that are
        not served; then neither the segment nor its continuations are removed.
      why: the fault of the first chunk that stays bad; empty if none does.
    """

    usable: int
    served: int
    kept: bool
    why: str

    @property
    def removed(self) -> bool:
        """Whether the segment is removed, because no chunk of it is usable."""
        return bool(self.why) and not (self.served or self.kept)


def repair_outcome(
    manifest: Manifest | None, found: Sequence[Damage], left: Sequence[Damage], tried: bool
) -> RepairOutcome:
    """Computes the outcome of a repair of one segment.

    Args:
      manifest: its manifest; None if it cannot be read.
      found: all damage of the segment.
      left: the damage that remains after probes and digests were rebuilt.
      tried: whether they could be rebuilt; if not, a later repair may succeed.
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
    """Predicts the outcome of a repair that has not run, if the disk works and no other process is
    repairing."""
    if manifest is None or not known(manifest.layout):
        return repair_outcome(manifest, found, found, False)
    torn = {d.chunk for d in found if d.kind == "packs"}
    return repair_outcome(manifest, found, [d for d in found if not _follows(d, torn)], True)


def _follows(damage: Damage, torn: set[int]) -> bool:
    """Whether damage can be rebuilt from packs, given the chunks whose packs are bad (`torn`)."""
    if damage.kind == "digest":
        return not torn
    return damage.kind == "probe" and damage.chunk not in torn


def planned_repairs(store: ChunkStore, report: VerifyReport) -> list[str]:
    """Describes what a repair would do with each damaged segment of `report`, if the disk works and
    no other process is repairing; changes nothing."""
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
        return "be repaired: the damaged data is rebuilt from its packs"
    if not outcome.served:
        return "be kept but not served until its text is ingested again"
    return f"be limited to its first {outcome.served} of {manifest.chunks} chunks"


def verify_store(
    store: ChunkStore,
    repair: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Checks every pack, probe, digest and manifest of a store.

    Args:
      store: an open store.
      repair: rebuild probes and digests, remove segments proven useless, limit others to their
        good chunks, unmark undamaged ones, rebuild the index, and remove the files of killed
        writers. Data that could not be read or rebuilt now stays as it is.
      progress: called with (bytes checked, total bytes).

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
    parents = {e.id: e.parent for e in store.index.catalog.entries()}
    named = {manifest.segment_id: manifest.parent for manifest, _, _ in known}
    wrong = {id_ for id_, parent in named.items() if parents.get(id_, "") != parent}
    report.unindexed = sorted(wrong | (parents.keys() - set(ids)))
    total = sum(size for _, _, size in known)
    segments: dict[str, Loaded] = {}
    for manifest, checksum, size in known:
        _check(store, manifest, checksum, report)
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
        orphaned = Damage(id_, 0, "the segment that it continues is gone or damaged", "parent")
        report.damages.append(orphaned)
        outcomes[id_] = repair_outcome(segments[id_].manifest, [orphaned], [orphaned], True)
    if repair:
        _repair(store, report, segments, outcomes)
        store.bounds.sweep()
    return report


def _check(store: ChunkStore, manifest: Manifest, checksum: str, report: VerifyReport) -> None:
    """Reads all of one segment without marking anything; notes in `report` what is not good."""
    layout, chunks = manifest.layout, manifest.chunks
    kind, noted = "segment", 0

    def note(_: Segment | None, bad: list[tuple[int, str]], proof: bool) -> None:
        nonlocal noted
        noted += len(bad)
        found = [Damage(manifest.segment_id, chunk, reason, kind) for chunk, reason in bad]
        (report.damages if proof else report.unread).extend(found)

    try:
        segment = store.open_segment(manifest, checksum)
    except (SegmentDamaged, StoreUnavailable) as e:
        return note(None, [(0, str(e))], isinstance(e, SegmentDamaged))
    kind = "packs"
    with store.segment_reader(_alone(manifest, checksum), segment, note) as reader:
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
            note(segment, [(0, str(e))], False)
        else:
            kind = "digest"
            if reader.read_digest() is None and layout.digest != "none" and not noted:
                note(segment, [(0, "digest: not read")], False)


def _read_probe(reader: PrefixReader, layer: int) -> None:
    """Reads the whole probe of a layer; the reader reports its bad pieces."""
    layout = reader.prefix.layout
    pages = ProbePages(reader.prefix, layout.probe_block(reader.prefix.num_chunks))
    size = pages.most * layout.chunk_tokens * pages.token_bytes
    out = np.empty((min(max(1, _PIECE_BYTES // size), len(pages)), size), np.uint8)
    for first in range(0, len(pages), len(out)):
        ids = np.arange(first, min(first + len(out), len(pages)))
        reader.read_probe_pages(layer, pages, ids, out[: len(ids)])


def _alone(manifest: Manifest, checksum: str) -> Prefix:
    """Wraps one segment as a prefix of its own, whatever it continues."""
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
    """Finds segments whose parents will not be there up to the segment's first chunk; none with an
    ancestor in `unknown`."""
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
    """Yields the ids of a segment's ancestors, up to the first that is missing."""
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
    """Rebuilds a segment's bad probes and digests; returns the outcome."""
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
    """Rebuilds bad probes and digests; returns the segment, or None if its codec is unknown."""
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


def _as_found(store: ChunkStore, segments: dict[str, Loaded], ids: Iterable[str]) -> bool:
    """Whether none of some segments was replaced since it was checked; False if that is unknown."""
    try:
        for id_, manifest, checksum, _ in store.index.manifests(ids):
            if isinstance(manifest, SegmentUnfinished):
                same = id_ not in store.files.segment_ids()  # else it may be uploaded now
            elif isinstance(manifest, Manifest):
                same = id_ in segments and segments[id_].checksum == checksum
            else:
                same = isinstance(manifest, SegmentDamaged)
            if not same:
                return False
        return True
    except StoreUnavailable:
        return False


def _repair(
    store: ChunkStore,
    report: VerifyReport,
    segments: dict[str, Loaded],
    outcomes: dict[str, RepairOutcome],
) -> None:
    """Removes useless segments, marks those that stay bad, and unmarks undamaged ones. What was
    replaced since it was checked stays as it is."""
    orphans = {d.segment_id for d in report.damages if d.kind == "parent"}
    for id_, after in outcomes.items():
        line = _line(segments[id_], segments) if id_ in orphans else ()
        as_found = partial(_as_found, store, segments, (id_, *line))
        alike = id_ in segments and segments[id_].manifest.layout.alike
        if not after.why:
            report.remade.append(id_)
            continue
        if after.kept and not (alike and after.served):
            report.unrepaired.append(id_)
        if after.removed and store.bounds.remove(id_, f"repair: {after.why}", as_found):
            report.removed.append(id_)
        elif id_ in segments and as_found():
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
