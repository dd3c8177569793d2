"""What a repair of a store would do to what is damaged."""

from __future__ import annotations

from ckv_jax.storage.index.wishes import Wish
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.tools.damage import VerifyReport, by_segment
from ckv_jax.storage.tools.fate import Fate, foretold


def losses(store: ChunkStore, report: VerifyReport) -> list[str]:
    """What a repair would do for each segment that `verify_store` found damaged, changing nothing.

    As far as the disk does not fail it, and nobody else is mending.
    """
    said = store.wishes()
    lines = []
    for id_, found in by_segment(report.damages).items():
        loaded = store.index.find(id_)
        manifest = None if loaded is None else loaded.manifest
        wish = said.get(manifest.links[-1].hex(), Wish()) if manifest is not None else Wish()
        about = f" ({wish.name or wish.begins})" if wish.name or wish.begins else ""
        lines.append(f"{id_}{about}: {_told(manifest, foretold(manifest, found))}")
    return lines


def _told(manifest: Manifest | None, fate: Fate) -> str:
    if manifest is None or fate.removed:
        return "be removed"
    if not fate.why:
        return "be made whole: what is damaged follows from its packs"
    if not fate.served:
        return "be kept and not served, until its text is ingested again"
    return f"be limited to its first {fate.served} of {manifest.chunks} chunks"
