"""Which stored segments cover the start of a prompt, and where a named prefix lies."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.errors import PrefixNotFound, SegmentDamaged
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.index.catalog import Catalog
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.manifest import Manifest, is_id


@dataclass(frozen=True, slots=True)
class Loaded:
    """A segment's manifest, its checksum, and the chunks before the first quarantined one."""

    manifest: Manifest
    checksum: str
    usable: int


Load = Callable[[str], Loaded | None]
"""The segment of an id; None when it is gone or damaged."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of a segment that equals the prompt: from its first chunk up to token `end`."""

    loaded: Loaded
    end: int  # in tokens of the prompt

    @property
    def first(self) -> int:
        return self.loaded.manifest.first_chunk

    @property
    def whole(self) -> int:
        """Where the run's whole chunks end; 0 for a reordered one, which cannot be cut."""
        layout = self.loaded.manifest.layout
        whole = self.end // layout.chunk_tokens * layout.chunk_tokens
        return 0 if layout.reordered and whole < self.end else whole


def longest(
    tokens: np.ndarray,
    *,
    fingerprint: Fingerprint,
    layout: Layout,
    salt: str,
    catalog: Catalog,
    load: Load,
) -> Prefix:
    """The longest stored prefix of `tokens` int32 [T]; empty when nothing is stored.

    Links only propose segments: the tokens of every span are compared with the prompt's.
    """
    size = layout.chunk_tokens
    whole = tokens[: len(tokens) // size * size]
    links = [chain.seed(fingerprint, layout, salt)]
    links += chain.links(links[0], whole, size)

    def pieces(ids: list[str]) -> list[_Piece]:
        found = (_match(loaded, tokens, links) for id_ in ids if (loaded := load(id_)))
        return [p for p in found if p is not None]

    candidates = pieces(catalog.starting_with(links[1:])) if len(links) > 1 else []
    spans: list[Span] = []
    at = 0  # tokens covered
    while reach := [p for p in candidates if p.whole > at and _joins(p, at // size)]:
        best = max(reach, key=lambda p: (p.whole, -p.first))
        _extend(spans, best, at // size, best.whole // size)
        at = best.whole
    # A partial chunk ends a prefix: the tail of a segment, or a segment of its own.
    chunk = at // size
    rest = [tokens[at : at + r] for r in range(1, min(size, len(tokens) - at + 1))]
    tails = [chain.link(links[chunk], part.astype("<i4").tobytes()) for part in rest]
    reach = candidates + (pieces(catalog.starting_with(tails)) if tails else [])
    reach = [p for p in reach if p.end > at and _joins(p, chunk)]
    if reach:
        best = max(reach, key=lambda p: p.end)
        _extend(spans, best, chunk, layout.num_chunks(best.end))
        at = best.end
    end = links[at // size]
    if at % size:
        end = chain.link(end, tokens[at - at % size : at].astype("<i4").tobytes())
    return Prefix(
        id=end.hex(),
        tokens=chain.as_tokens(tokens[:at]),
        spans=tuple(spans),
        layout=layout,
        fingerprint=fingerprint,
        salt=salt,
    )


def _match(loaded: Loaded, tokens: np.ndarray, links: list[bytes]) -> _Piece | None:
    """How far a segment agrees with the prompt; only whole chunks, or all of it."""
    manifest = loaded.manifest
    size, first = manifest.layout.chunk_tokens, manifest.first_chunk
    if first >= len(links) or manifest.start != links[first]:
        return None
    start = first * size
    length = min(len(manifest.tokens), len(tokens) - start, loaded.usable * size)
    differ = manifest.tokens[:length] != tokens[start : start + length]
    same = int(differ.argmax()) if differ.any() else length
    if same < len(manifest.tokens):
        same = 0 if manifest.layout.reordered else same // size * size
    return _Piece(loaded, start + same) if same else None


def _joins(piece: _Piece, chunk: int) -> bool:
    """Whether the run may be entered at `chunk`; a reordered segment only at its start."""
    return piece.first <= chunk and not (
        piece.loaded.manifest.layout.reordered and piece.first != chunk
    )


def _extend(spans: list[Span], piece: _Piece, first: int, end: int) -> None:
    """Append chunks [first, end) of the prefix, out of `piece`."""
    span = _span(piece.loaded, first - piece.first, end - first)
    if spans and spans[-1].segment_id == span.segment_id:
        before = spans.pop()  # the earlier run of the same segment ended where this one starts
        end = span.first_chunk + span.num_chunks
        span = replace(before, num_chunks=end - before.first_chunk)
    spans.append(span)


def _span(loaded: Loaded, first: int, chunks: int) -> Span:
    return Span(
        segment_id=loaded.manifest.segment_id,
        first_chunk=first,
        num_chunks=chunks,
        segment_chunks=loaded.manifest.chunks,
        checksum=loaded.checksum,
    )


def by_id(prefix_id: str, *, catalog: Catalog, load: Load) -> Prefix:
    """The stored prefix named `prefix_id`, or the only one whose name starts so.

    Raises:
      PrefixNotFound: with close ids.
    """
    ids = [prefix_id] if is_id(prefix_id) else []
    ends: list[str] = []
    if not ids:
        ends = catalog.ends()
        ids = sorted({e for e in ends if prefix_id and e.startswith(prefix_id)})
    if len(ids) == 1:
        link = bytes.fromhex(ids[0])
        for segment_id in dict.fromkeys(catalog.ending_with(link) + catalog.passing(link)):
            loaded = load(segment_id)
            if loaded is not None and link in loaded.manifest.links:
                try:
                    return resolve(loaded, loaded.manifest.links.index(link) + 1, load)
                except SegmentDamaged:
                    continue
    ends = sorted(set(ends or catalog.ends()))
    close = [e for e in ends if prefix_id and e.startswith(prefix_id[:6])]
    close += difflib.get_close_matches(prefix_id, ends[:1000], n=3, cutoff=0.4)
    raise PrefixNotFound(prefix_id, list(dict.fromkeys(close))[:5])


def resolve(loaded: Loaded, chunks: int, load: Load) -> Prefix:
    """The prefix that ends with the first `chunks` chunks of a segment.

    Raises:
      SegmentDamaged: a segment that it continues is gone, or is not what it continued.
    """
    last = loaded.manifest
    layout, link = last.layout, last.links[chunks - 1]
    parts: list[tuple[Loaded, int]] = [(loaded, chunks)]
    while (manifest := parts[-1][0].manifest).parent is not None:
        parent = load(manifest.parent)
        if parent is None:
            raise SegmentDamaged(f"segment {manifest.segment_id}: its parent is gone")
        before = manifest.first_chunk - parent.manifest.first_chunk
        whole = len(parent.manifest.tokens) // layout.chunk_tokens
        if not 0 < before <= whole or parent.manifest.links[before - 1] != manifest.start:
            raise SegmentDamaged(f"segment {manifest.segment_id}: does not continue its parent")
        parts.append((parent, before))
    parts.reverse()
    tokens = [p.manifest.tokens[: n * layout.chunk_tokens] for p, n in parts]
    return Prefix(
        id=link.hex(),
        tokens=chain.as_tokens(np.concatenate(tokens)),
        spans=tuple(_span(p, 0, n) for p, n in parts),
        layout=layout,
        fingerprint=last.fingerprint,
        salt=last.salt,
    )
