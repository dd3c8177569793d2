"""Creation of segments: makes room, fills a workspace, publishes it by a rename."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.codec import Codec
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.errors import StoreClosed, StoreError
from ckv_jax.storage.index.bounds import Bounds
from ckv_jax.storage.index.index import Index
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.files import Workspace
from ckv_jax.storage.place.place import Place
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.manifest import Manifest, draft_manifest
from ckv_jax.storage.segment.segment import Opened, OpenSegments, Segment
from ckv_jax.storage.segment.writer import SegmentWriter


@dataclass(frozen=True, slots=True)
class Writers:
    """Starts the writers of a store, and publishes what they wrote."""

    place: Place
    index: Index
    bounds: Bounds
    config: StoreConfig
    segments: OpenSegments

    def start(
        self,
        fingerprint: Fingerprint,
        layout: Layout,
        tokens: np.ndarray,
        parent: Prefix | None,
        salt: str,
        order: np.ndarray | None,
        provenance: str,
        codec: Codec | None,
    ) -> SegmentWriter:
        """A writer of the segment of `tokens` after `parent`, whose segments stay until it is
        closed; see `ChunkStore.writer`."""
        start, before, exact, last = _continue(parent, fingerprint, layout, salt, provenance)
        draft = draft_manifest(
            layout=layout,
            fingerprint=fingerprint,
            tenant=chain.tenant_mark(salt),
            provenance=provenance,
            tokens=tokens,
            start=start,
            parent=last.segment_id if last else None,
            first_chunk=before,
            order=order,
            key=self.place.key,
        )
        held = self.segments.acquire_all(parent.spans) if parent else []
        try:
            workspace = self.place.files.workspace()
        except BaseException:
            self.segments.release(held)
            raise

        def give_back() -> None:
            with contextlib.suppress(StoreClosed):  # the next open finds the writer dead
                self.index.catalog.release(workspace.name)

        def done() -> None:
            self.segments.release(held)
            give_back()

        try:
            size = layout.segment_bytes(len(tokens)) + draft.encryption_bytes
            self.bounds.reserve(workspace.name, size, draft.tenant)
            if parent is None:
                params = self.params_of(self.index.catalog.children(draft.segment_id))
            else:
                params = _params(held[-1])
        except BaseException:
            with contextlib.ExitStack() as undo:  # in reverse order, each also if one raises
                undo.callback(give_back)
                undo.callback(workspace.discard)
                undo.callback(self.segments.release, held)
            raise
        return SegmentWriter(
            draft,
            workspace,
            self.place,
            params=params,
            codec=codec,
            publish=lambda: self._publish(draft, workspace, parent, exact, salt),
            release=done,
            room=self.bounds.make_room,
            write_s=self.config.write_s,
        )

    def params_near(self, manifest: Manifest) -> np.ndarray | None:
        """The digest parameters of what a segment continues, or of what continues it."""
        parent = [] if manifest.parent is None else [manifest.parent]
        return self.params_of(parent + self.index.catalog.children(manifest.segment_id))

    def params_of(self, ids: Iterable[str]) -> np.ndarray | None:
        """The digest parameters of the first of some segments that can be read."""
        for id_ in ids:
            loaded = self.index.load(id_)
            if loaded is not None:
                held = self.segments.acquire_all([loaded.manifest.span(loaded.checksum)])
                try:
                    found = _params(held[0])
                finally:
                    self.segments.release(held)
                if found is not None:
                    return found
        return None

    def _publish(
        self,
        manifest: Manifest,
        workspace: Workspace,
        parent: Prefix | None,
        exact: int,
        salt: str,
    ) -> Prefix:
        """Put a finished segment in its place, and say which prefix that makes."""
        id_, checksum = manifest.segment_id, manifest.encode()[1]

        def keep() -> bool:
            there = self.index.find(id_, again=True)  # objects may have gone unseen
            whole = there is not None and there.usable == there.manifest.chunks
            return whole and not self.place.files.damaged(id_, manifest.files)

        if not workspace.publish(id_, keep):  # another writer of the same prefix was faster
            there = self.index.find(id_)
            if there is None:
                raise StoreError(f"segment {id_}: another writer published it, and it was removed")
            manifest, checksum = there.manifest, there.checksum
        self.index.add(manifest, checksum, workspace.name)
        tokens = manifest.tokens
        if parent is not None:
            tokens = chain.as_tokens(np.concatenate([parent.tokens, tokens]))
        return Prefix(
            id=manifest.links[-1].hex(),
            tokens=tokens,
            spans=(*(parent.spans if parent else ()), manifest.span(checksum)),
            layout=manifest.layout,
            fingerprint=manifest.fingerprint,
            salt=salt,
            provenance=manifest.provenance,
            exact_chunks=exact,
        )


def _params(segment: Opened) -> np.ndarray | None:
    return segment.digest_params() if isinstance(segment, Segment) else None


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
