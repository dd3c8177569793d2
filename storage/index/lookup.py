"""Which stored segments cover the start of a prompt, and where a named prefix lies."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.errors import PrefixNotFound, SegmentDamaged
from ckv_jax.storage.index.catalog import Catalog
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.manifest import Manifest, is_id, starts


@dataclass(frozen=True, slots=True)
class Loaded:
    """A segment's manifest, its checksum, and the chunks before the first quarantined one."""

    manifest: Manifest
    checksum: str
    usable: int


_MOST_TURNS = 16  # places of a prompt where KV of another provenance is looked for

Load = Callable[[str], Loaded | None]
"""The segment of an id; None when it is gone or damaged."""


@dataclass(frozen=True, slots=True)
class _ChainPath:
    """The links over a prompt when KV of a provenance starts at chunk `turn`.

    `links[i]` stands before chunk i; those before `turn` are of exact KV.
    """

    links: list[bytes]
    turn: int
    provenance: str


@dataclass(frozen=True, slots=True)
class _Cover:
    """What is stored of a prompt: spans up to token `end`, along a way."""

    spans: tuple[Span, ...]
    end: int
    way: _ChainPath


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of a segment that equals the prompt: from its first chunk up to token `end`."""

    loaded: Loaded
    end: int  # in tokens of the prompt
    way: _ChainPath  # that it lies on

    @property
    def first(self) -> int:
        return self.loaded.manifest.first_chunk

    @property
    def whole(self) -> int:
        """Where the run's whole chunks end; at or before its start for what cannot be cut."""
        manifest = self.loaded.manifest
        size, start = manifest.layout.chunk_tokens, self.first * manifest.layout.chunk_tokens
        if self.end % size == 0:
            return self.end
        return start + manifest.layout.cut(self.end // size * size - start, len(manifest.tokens))


def longest(
    tokens: np.ndarray,
    *,
    fingerprint: Fingerprint,
    layout: Layout,
    salt: str,
    provenance: str,
    catalog: Catalog,
    load: Load,
) -> Prefix:
    """The longest stored prefix of `tokens` int32 [T]; empty when nothing is stored.

    Exact KV serves any lookup, and what was made otherwise only one that asks for it. Links only
    propose segments: the tokens of every span are compared with the prompt's.
    """
    size = layout.chunk_tokens
    whole = tokens[: len(tokens) // size * size]
    links = [chain.seed(fingerprint, layout, salt)]
    links += chain.links(links[0], whole, size)

    def pieces(firsts: list[bytes], way: _ChainPath) -> list[_Piece]:
        ids = catalog.starting_with(firsts) if firsts else []
        found = (_match(loaded, tokens, way) for id_ in ids if (loaded := load(id_)))
        return [p for p in found if p is not None]

    exact = _ChainPath(links, 0, chain.EXACT)
    stored = pieces(links[1:], exact)
    best = _cover(tokens, [exact], size, stored, pieces)
    if provenance != chain.EXACT:
        branches = [chain.branch(link, provenance) for link in links]
        firsts = [
            chain.link(branch, part.astype("<i4").tobytes())
            for branch, part in zip(branches, whole.reshape(-1, size), strict=False)
        ]
        turns = {best.end // size}  # where the exact KV ends, there may be less than a chunk
        for id_ in catalog.starting_with(firsts) if firsts else []:
            turns.update((loaded.manifest.first_chunk,) if (loaded := load(id_)) else ())
        for turn in sorted(turns, reverse=True)[:_MOST_TURNS]:
            if turn < len(links):
                onward = list(chain.links(branches[turn], whole[turn * size :], size))
                way = _ChainPath([*links[:turn], branches[turn], *onward], turn, provenance)
                more = pieces(onward, way)
                cover = _cover(tokens, [exact, way], size, [*stored, *more], pieces)
                best = max(best, cover, key=lambda c: c.end)  # the exact one where both are as long
    at, way = best.end, best.way
    end = way.links[at // size]
    if at % size:
        end = chain.link(end, tokens[at - at % size : at].astype("<i4").tobytes())
    return Prefix(
        id=end.hex(),
        tokens=chain.as_tokens(tokens[:at]),
        spans=best.spans,
        layout=layout,
        fingerprint=fingerprint,
        salt=salt,
        provenance=way.provenance,
        exact_chunks=way.turn,
    )


def _cover(
    tokens: np.ndarray,
    ways: list[_ChainPath],
    size: int,
    candidates: list[_Piece],
    pieces: Callable[[list[bytes], _ChainPath], list[_Piece]],
) -> _Cover:
    """How far `candidates`, and partial chunks after them, cover the prompt from its start."""
    spans: list[Span] = []
    at, way = 0, ways[0]  # tokens covered, and whether all of that is exact
    while reach := [p for p in candidates if p.whole > at and _joins(p, at // size, spans)]:
        best = max(reach, key=lambda p: (p.whole, -p.first))
        _extend(spans, best, at // size, best.whole // size)
        at, way = best.whole, way if best.way is ways[0] else best.way
    # A partial chunk ends a prefix: the tail of a segment, or a segment of its own.
    chunk = at // size
    rest = [tokens[at : at + r] for r in range(1, min(size, len(tokens) - at + 1))]
    for tried in ways:
        if tried.turn <= chunk:
            before = tried.links[chunk]
            tails = [chain.link(before, part.astype("<i4").tobytes()) for part in rest]
            candidates = candidates + pieces(tails, tried)
    reach = [p for p in candidates if p.end > at and _joins(p, chunk, spans)]
    if reach:
        best = max(reach, key=lambda p: p.end)
        _extend(spans, best, chunk, -(-best.end // size))
        at, way = best.end, way if best.way is ways[0] else best.way
    return _Cover(tuple(spans), at, way)


def _match(loaded: Loaded, tokens: np.ndarray, way: _ChainPath) -> _Piece | None:
    """How far a segment agrees with the prompt; only whole chunks, or all of it."""
    manifest = loaded.manifest
    size, first = manifest.layout.chunk_tokens, manifest.first_chunk
    if not way.turn <= first < len(way.links) or manifest.start != way.links[first]:
        return None
    if manifest.provenance != way.provenance:
        return None
    start = first * size
    length = min(len(manifest.tokens), len(tokens) - start, loaded.usable * size)
    differ = manifest.tokens[:length] != tokens[start : start + length]
    same = int(differ.argmax()) if differ.any() else length
    same = manifest.layout.cut(same, len(manifest.tokens))
    return _Piece(loaded, start + same, way) if same else None


def _joins(piece: _Piece, chunk: int, spans: Sequence[Span]) -> bool:
    """Whether the run may be entered at `chunk`, after `spans`; what is not in its order only at
    its start, or where it goes on itself."""
    manifest = piece.loaded.manifest
    if piece.first >= chunk or not (manifest.layout.reordered or manifest.layout.alike):
        return piece.first <= chunk
    return bool(spans) and spans[-1].segment_id == manifest.segment_id


def _extend(spans: list[Span], piece: _Piece, first: int, end: int) -> None:
    """Append chunks [first, end) of the prefix, out of `piece`."""
    span = piece.loaded.manifest.span(piece.loaded.checksum, first - piece.first, end - first)
    if spans and spans[-1].segment_id == span.segment_id:
        before = spans.pop()  # the earlier run of the same segment ended where this one starts
        end = span.first_chunk + span.num_chunks
        span = replace(before, num_chunks=end - before.first_chunk)
    spans.append(span)


def by_id(prefix_id: str, *, salt: str | None, catalog: Catalog, load: Load) -> Prefix:
    """The stored prefix named `prefix_id`, or the only one whose name starts so.

    Args:
      prefix_id: hex.
      salt: whose it must be, for which nobody else's exists; None: anybody's.
      catalog, load: where to look.

    Raises:
      PrefixNotFound: with close ids of the same tenant; of those without a salt where none is said;
        or with that of the prefix that it ends inside of, see `Layout.cut`.
    """
    whose = None if salt is None else chain.tenant_mark(salt)
    ids = [prefix_id] if is_id(prefix_id) else []
    if not ids:
        ids = sorted({e for e in catalog.ends(whose) if prefix_id and e.startswith(prefix_id)})
    if len(ids) == 1:
        link, within = bytes.fromhex(ids[0]), ""
        holders = catalog.ending_with(link, whose) + catalog.passing(link, whose)
        for segment_id in dict.fromkeys(holders):  # none of another tenant's is opened
            loaded = load(segment_id)
            if loaded is None or link not in loaded.manifest.links:
                continue
            if whose is None or loaded.manifest.tenant == whose:
                chunks, manifest = loaded.manifest.links.index(link) + 1, loaded.manifest
                if not _cuts(manifest, chunks):
                    within = manifest.links[-1].hex()
                    continue
                with contextlib.suppress(SegmentDamaged):
                    return resolve(loaded, chunks, load, salt)
        if within:
            raise PrefixNotFound(ids[0], [within], within=within)
    ends = sorted(set(catalog.ends(chain.PUBLIC if whose is None else whose)))
    if len(ids) > 1:
        named = set(ends)
        raise PrefixNotFound(prefix_id, [i for i in ids if i in named][:5], several=len(ids))
    close = [e for e in ends if prefix_id and e.startswith(prefix_id[:6])]
    close += difflib.get_close_matches(prefix_id[:64], ends[:1000], n=3, cutoff=0.4)
    raise PrefixNotFound(prefix_id, list(dict.fromkeys(close))[:5])


def resolve(loaded: Loaded, chunks: int, load: Load, salt: str | None = None) -> Prefix:
    """The prefix that ends with the first `chunks` chunks of a segment.

    Raises:
      SegmentDamaged: a segment that it continues is gone, or is not what it continued, or the first
        one does not begin as one of this `salt` must; or the tokens of those chunks are not the
        segment's first.
    """
    last = loaded.manifest
    layout, link = last.layout, last.links[chunks - 1]
    if not _cuts(last, chunks):
        raise SegmentDamaged(f"segment {last.segment_id}: cannot be used up to chunk {chunks}")
    parts: list[tuple[Loaded, int]] = [(loaded, chunks)]
    exact = 0  # chunks
    while (manifest := parts[-1][0].manifest).parent is not None:
        parent = load(manifest.parent)
        if parent is None:
            raise SegmentDamaged(f"segment {manifest.segment_id}: its parent is gone")
        before = manifest.first_chunk - parent.manifest.first_chunk
        whole = len(parent.manifest.tokens) // layout.chunk_tokens
        goes_on = 0 < before <= whole and _continues(manifest, parent.manifest, before)
        if not goes_on or not _cuts(parent.manifest, before):
            raise SegmentDamaged(f"segment {manifest.segment_id}: does not continue its parent")
        if manifest.provenance != parent.manifest.provenance:
            exact = manifest.first_chunk
        parts.append((parent, before))
    parts.reverse()
    if salt is not None and not starts(parts[0][0].manifest, salt):
        raise SegmentDamaged(f"segment {parts[0][0].manifest.segment_id}: another tenant's")
    tokens = [p.manifest.tokens[: n * layout.chunk_tokens] for p, n in parts]
    return Prefix(
        id=link.hex(),
        tokens=chain.as_tokens(np.concatenate(tokens)),
        spans=tuple(p.manifest.span(p.checksum, 0, n) for p, n in parts),
        layout=layout,
        fingerprint=last.fingerprint,
        salt=chain.unknown_salt(last.tenant) if salt is None else salt,
        provenance=last.provenance,
        exact_chunks=exact,
    )


def _cuts(manifest: Manifest, chunks: int) -> bool:
    """Whether the first `chunks` chunks of a segment hold its first tokens and no others."""
    total = len(manifest.tokens)
    tokens = min(chunks * manifest.layout.chunk_tokens, total)
    return manifest.layout.cut(tokens, total) == tokens


def _continues(manifest: Manifest, parent: Manifest, before: int) -> bool:
    """Whether a segment starts where the first `before` chunks of its parent end."""
    link, branched = parent.links[before - 1], parent.provenance != manifest.provenance
    if branched and parent.provenance != chain.EXACT:
        return False
    whose = manifest.tenant == parent.tenant and manifest.fingerprint == parent.fingerprint
    return whose and manifest.start == (
        chain.branch(link, manifest.provenance) if branched else link
    )
