"""How segments come to be: room is made, a writer fills a workspace, a rename publishes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.codec import Codec
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import StoreClosed, StoreError
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.index.bounds import Bounds
from ckv_jax.storage.index.index import Index
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.files import Workspace
from ckv_jax.storage.place.place import Place
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.manifest import Manifest, draft_manifest
from ckv_jax.storage.segment.segment import Opened, OpenSegments, Segment
from ckv_jax.storage.segment.writer import SegmentWriter


def open_writer(
    *,
    place: Place,
    index: Index,
    bounds: Bounds,
    config: StoreConfig,
    segments: OpenSegments,
    fingerprint: Fingerprint,
    layout: Layout,
    tokens: np.ndarray,
    parent: Prefix | None,
    salt: str,
    order: np.ndarray | None,
    provenance: str,
    codec: Codec | None,
) -> SegmentWriter:
    """A writer of the segment of `tokens` after `parent`; see `ChunkStore.writer`.

    Args:
      place, index, bounds, config: of the store.
      segments: of the store; the parent's stay until the writer is closed.
      fingerprint, layout, tokens, parent, salt, order, provenance, codec: as there.
    """
    start, before, exact, holder = _continue(parent, fingerprint, layout, salt, provenance)
    draft = draft_manifest(
        layout=layout,
        fingerprint=fingerprint,
        tenant=chain.tenant_mark(salt),
        provenance=provenance,
        tokens=tokens,
        start=start,
        parent=holder.segment_id if holder else None,
        first_chunk=before,
        order=order,
    )
    held = segments.acquire_all(parent.spans) if parent else []
    workspace: Workspace | None = None
    try:
        size = layout.segment_bytes(len(tokens))
        workspace = place.files.workspace()
        bounds.reserve(workspace.name, size, draft.tenant)
        inherited = _params(held[-1]) if held else None
        if parent is None:
            inherited = inherit(index, segments, index.catalog.children(draft.segment_id))
    except BaseException:
        segments.release(held)
        if workspace is not None:
            workspace.discard()
            _give_back(bounds, workspace.name)
        raise
    name = workspace.name

    def publish(manifest: Manifest, workspace: Workspace) -> Prefix:
        return _publish(place, index, name, parent, exact, salt, manifest, workspace)

    def done() -> None:
        segments.release(held)
        _give_back(bounds, name)

    return SegmentWriter(
        draft,
        workspace,
        direct=place.direct,
        params=inherited,
        codec=codec,
        publish=publish,
        release=done,
        patience=place.patience,
        write_s=config.write_s,
    )


def neighbours(index: Index, manifest: Manifest) -> list[str]:
    """Ids of the segment that a segment continues, and of those that continue it."""
    parent = [] if manifest.parent is None else [manifest.parent]
    return parent + index.catalog.children(manifest.segment_id)


def inherit(index: Index, segments: OpenSegments, ids: Iterable[str]) -> np.ndarray | None:
    """The digest parameters of the first of some segments that can be read."""
    for id_ in ids:
        loaded = index.load(id_)
        if loaded is not None:
            held = segments.acquire_all([whole_span(loaded.manifest, loaded.checksum)])
            try:
                found = _params(held[0])
            finally:
                segments.release(held)
            if found is not None:
                return found
    return None


def _params(segment: Opened) -> np.ndarray | None:
    return segment.digest_params() if isinstance(segment, Segment) else None


def whole_span(manifest: Manifest, checksum: str) -> Span:
    """All of a segment."""
    return Span(
        segment_id=manifest.segment_id,
        first_chunk=0,
        num_chunks=manifest.chunks,
        segment_chunks=manifest.chunks,
        checksum=checksum,
    )


def _give_back(bounds: Bounds, name: str) -> None:
    with contextlib.suppress(StoreClosed):  # the next open finds the writer dead
        bounds.release(name)


def _continue(
    parent: Prefix | None, fingerprint: Fingerprint, layout: Layout, salt: str, provenance: str
) -> tuple[bytes, int, int, Span | None]:
    """(link, chunks before, exact chunks, last span) that a segment after `parent` starts with."""
    if parent is None:
        return chain.branch(chain.seed(fingerprint, layout, salt), provenance), 0, 0, None
    parent.fingerprint.require(fingerprint)
    if parent.layout != layout or parent.salt != salt:
        raise ValueError("parent: expected one of the same layout and salt")
    if parent.num_tokens % layout.chunk_tokens:
        raise ValueError(
            f"parent: got {parent.num_tokens} tokens, expected whole chunks of "
            f"{layout.chunk_tokens} (Prefix.whole_chunks)"
        )
    link = bytes.fromhex(parent.id)
    if parent.provenance == provenance:
        return link, parent.num_chunks, parent.exact_chunks, parent.spans[-1]
    if parent.provenance != chain.EXACT:
        raise ValueError(
            f"provenance: got {provenance!r} after a parent of {parent.provenance!r}, expected "
            "the same, or an exact parent"
        )
    return chain.branch(link, provenance), parent.num_chunks, parent.num_chunks, parent.spans[-1]


def _publish(
    place: Place,
    index: Index,
    reservation: str,
    parent: Prefix | None,
    exact: int,
    salt: str,
    manifest: Manifest,
    workspace: Workspace,
) -> Prefix:
    """Put a finished segment in its place, and say which prefix that makes."""
    id_, checksum = manifest.segment_id, manifest.encode()[1]

    def keep() -> bool:
        there = index.find(id_)
        whole = there is not None and there.usable == there.manifest.chunks
        return whole and not place.files.damaged(id_, manifest.files)

    if not workspace.publish(id_, keep):  # another writer of the same prefix was faster
        there = index.find(id_)
        if there is None:
            raise StoreError(f"segment {id_}: published by another writer, and gone again")
        manifest, checksum = there.manifest, there.checksum
    index.add(manifest, checksum, reservation)
    span = whole_span(manifest, checksum)
    tokens = manifest.tokens
    if parent is not None:
        tokens = chain.as_tokens(np.concatenate([parent.tokens, tokens]))
    return Prefix(
        id=manifest.links[-1].hex(),
        tokens=tokens,
        spans=(*(parent.spans if parent else ()), span),
        layout=manifest.layout,
        fingerprint=manifest.fingerprint,
        salt=salt,
        provenance=manifest.provenance,
        exact_chunks=exact,
    )
