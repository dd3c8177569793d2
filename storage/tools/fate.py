"""What becomes of a damaged segment, for a repair as well as for who asks what one would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckv_jax.storage.codec import known
from ckv_jax.storage.segment.manifest import Manifest, servable
from ckv_jax.storage.tools.damage import Damage


@dataclass(frozen=True, slots=True)
class Fate:
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


def fate(
    manifest: Manifest | None, found: Sequence[Damage], left: Sequence[Damage], tried: bool
) -> Fate:
    """What becomes of a segment.

    Args:
      manifest: its manifest; None: it cannot be read.
      found: all that is damaged.
      left: what of that stays so after probes and digests were made anew.
      tried: whether they could be; else another time may do.
    """
    why = min(left, key=lambda d: d.chunk).what if left else ""
    if manifest is None:
        return Fate(0, 0, False, why)
    chunks = manifest.chunks
    usable = min((d.chunk for d in left), default=chunks)
    torn = {d.chunk for d in found if d.kind == "packs"}
    if not left or any(d.kind in ("segment", "parent") for d in left):
        kept = False  # nothing to wait for: no ingest writes into what cannot be opened
    elif manifest.layout.alike:  # of use as a whole, which the next ingest of its text makes it
        kept = len(torn) < chunks
    else:
        kept = not torn if tried else usable < min(torn, default=chunks)
    return Fate(usable, servable(manifest, usable), kept, why)


def foretold(manifest: Manifest | None, found: Sequence[Damage]) -> Fate:
    """The same before anything is made anew: as far as the disk does not fail it, and nobody else
    is mending."""
    if manifest is None or not known(manifest.layout):
        return fate(manifest, found, found, False)
    torn = {d.chunk for d in found if d.kind == "packs"}
    return fate(manifest, found, [d for d in found if not _follows(d, torn)], True)


def _follows(damage: Damage, torn: set[int]) -> bool:
    """Whether what is damaged can be made anew from packs, of which chunks are `torn`."""
    if damage.kind == "digest":
        return not torn
    return damage.kind == "probe" and damage.chunk not in torn
