"""What is wrong with a store: single findings, and the report of them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


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
      unfinished: objects of an object store without a manifest, as somebody uploads them now or was
        killed while doing so; they are left alone.
      unindexed: segments that the index lacked, or had although they were gone.
      remade: segments whose probes or digests the repair made anew, and that are whole now.
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
