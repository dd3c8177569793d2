"""Reading everything there is, and saying what is not as it was written."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
from ckv_jax.storage.index import lookup
from ckv_jax.storage.index.lookup import Loaded
from ckv_jax.storage.index.wishes import Wish
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.segment import Segment
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.writing import whole_span

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
      damages: all that is proven to be damaged.
      unread: what could not be read in time, or at all just now; it may be whole.
      foreign: segments of another version of the format; they are left alone.
      unfinished: objects of an object store without a manifest, as somebody uploads them now or was
        killed while doing so; they are left alone.
      unindexed: segments that the index lacked, or had although they were gone.
      remade: segments whose probes or digests the repair made anew, and that are whole now.
      unrepaired: damaged segments that could not be made whole just now, or not here, and may be
        later; they are kept, and not served.
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


def losses(store: ChunkStore, report: VerifyReport) -> list[str]:
    """What a repair would do for each segment that `verify_store` found damaged, changing nothing.

    Probes and digests are made anew where the packs are whole, which only the repair finds out.
    """
    said = store.wishes()
    lines = []
    for id_ in dict.fromkeys(damage.segment_id for damage in report.damages):
        chunk = min(d.chunk for d in report.damages if d.segment_id == id_)
        found = store.index.find(id_)
        wish = said.get(found.manifest.links[-1].hex(), Wish()) if found is not None else Wish()
        about = f" ({wish.name or wish.begins})" if wish.name or wish.begins else ""
        total = f" of {found.manifest.chunks}" if found is not None else ""
        what = (
            f"be limited to its first {chunk}{total} chunks"
            if chunk
            else "be made anew where its packs are whole, removed where they are not"
        )
        lines.append(f"{id_}{about}: {what}")
    return lines


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
            report.damages.append(Damage(id_, 0, "the manifest is missing or damaged"))
        else:
            report.unread.append(Damage(id_, 0, str(manifest)))
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
    orphaned = [Damage(id_, 0, "what it continues is gone or damaged") for id_ in orphans]
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
    at_packs = True
    try:
        segment = store.open_segment(manifest, checksum)
    except SegmentDamaged as e:
        return [Damage(id_, 0, str(e))], [], {0}
    except StoreUnavailable as e:
        return [], [Damage(id_, 0, str(e))], torn
    whole = _alone(manifest, checksum)

    def note(_: Segment | None, chunk: int, reason: str, proof: bool) -> None:
        (damages if proof else unread).append(Damage(id_, chunk, reason))
        if proof and at_packs:
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
            at_packs = False
            if layout.alike:
                with contextlib.suppress(SegmentDamaged):  # which has been noted
                    _ = reader.order
            shape = (len(manifest.tokens), layout.probe_heads, layout.head_dim)
            for layer in layout.probe_layers:
                reader.read_probe(layer, np.empty(shape, layout.numpy_dtype))
        except ReadTimeout as e:  # its buffer is given up with it
            unread.append(Damage(id_, 0, str(e)))
        else:
            found = reader.read_digest()
            if found is None and layout.digest != "none" and not (damages or unread):
                unread.append(Damage(id_, 0, "digest: not read"))
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
    another time.
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
        useless = damage.chunk == 0 and id_ not in report.unrepaired
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
