"""What is wrong with a store, and what a repair makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckv_jax.storage.codec import known
from ckv_jax.storage.index.records import PrefixRecord
from ckv_jax.storage.segment.manifest import Manifest, servable
from ckv_jax.storage.store import ChunkStore


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
      foreign: segments of another version of the format; they are left alone.
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
