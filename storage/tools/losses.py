"""What a repair of a store would do to what is damaged."""

from __future__ import annotations

from ckv_jax.storage.codec import known
from ckv_jax.storage.index.wishes import Wish
from ckv_jax.storage.segment.manifest import Manifest, servable
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.tools.damage import Damage, VerifyReport


def losses(store: ChunkStore, report: VerifyReport) -> list[str]:
    """What a repair would do for each segment that `verify_store` found damaged, changing nothing.

    As far as the disk does not fail it, and nobody else is mending.
    """
    said = store.wishes()
    damages: dict[str, list[Damage]] = {}
    for damage in report.damages:
        damages.setdefault(damage.segment_id, []).append(damage)
    lines = []
    for id_, found in damages.items():
        loaded = store.index.find(id_)
        manifest = None if loaded is None else loaded.manifest
        wish = said.get(manifest.links[-1].hex(), Wish()) if manifest is not None else Wish()
        about = f" ({wish.name or wish.begins})" if wish.name or wish.begins else ""
        what = "be removed" if manifest is None else _fate(manifest, found)
        lines.append(f"{id_}{about}: {what}")
    return lines


def _fate(manifest: Manifest, damages: list[Damage]) -> str:
    """What a repair does for a segment whose manifest can be read."""
    chunks = manifest.chunks
    torn = {d.chunk for d in damages if d.kind == "packs"}
    left = [d.chunk for d in damages if not known(manifest.layout) or not _follows(d, torn)]
    served = servable(manifest, min(left, default=chunks))
    if served == chunks:
        return "be made whole: what is damaged follows from its packs"
    if mendable(manifest, torn) or not (known(manifest.layout) or torn):
        if not served:
            return "be kept and not served, until its text is ingested again"
    elif not served:
        return "be removed"
    return f"be limited to its first {served} of {chunks} chunks"


def _follows(damage: Damage, torn: set[int]) -> bool:
    """Whether what is damaged can be made anew from packs, of which chunks are `torn`."""
    if damage.kind == "digest":
        return not torn
    return damage.kind == "probe" and damage.chunk not in torn


def mendable(manifest: Manifest, torn: set[int]) -> bool:
    """Whether a segment of alike tokens, which is of use as a whole, is worth to be kept for the
    next ingest of its text: some chunk is good."""
    return manifest.layout.alike and len(torn) < manifest.chunks
