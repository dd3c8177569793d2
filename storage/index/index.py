"""The index: finds the stored segments of a prompt or prefix, and how far each can be served, from
catalog, manifests and quarantine marks."""

from __future__ import annotations

import contextlib
import difflib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ckv_jax.storage import chain
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.errors import (
    PrefixNotFound,
    SegmentDamaged,
    SegmentForeign,
    StoreClosed,
    StoreError,
    StoreUnavailable,
)
from ckv_jax.storage.index.catalog import Catalog, Described
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.manifest import Manifest, ManifestCache, is_id, starts
from ckv_jax.storage.segment.segment import Segment

if TYPE_CHECKING:
    from ckv_jax.storage.encryption import StoreKey


_MOST_TURNS = 16  # places of a prompt where KV of another provenance is looked for


@dataclass(frozen=True, slots=True)
class Loaded:
    """A segment's manifest, its checksum, and the chunks before the first quarantined one."""

    manifest: Manifest
    checksum: str
    usable: int


Load = Callable[[str], Loaded | None]
"""The segment of an id; None when it is gone or damaged."""


@dataclass(frozen=True, slots=True)
class _ChainPath:
    """The links over a prompt when KV of a provenance starts at chunk `turn`: `links[i]` stands
    before chunk i; those before `turn` are of exact KV."""

    links: list[bytes]
    turn: int
    provenance: str


@dataclass(frozen=True, slots=True)
class _Cover:
    """The stored part of a prompt: spans up to token `end`, along a path of links."""

    spans: tuple[Span, ...]
    end: int
    path: _ChainPath


@dataclass(frozen=True, slots=True)
class _Match:
    """A run of a segment that equals the prompt: from its first chunk up to token `end`."""

    loaded: Loaded
    end: int  # in tokens of the prompt
    path: _ChainPath  # that it lies on

    @property
    def first(self) -> int:
        return self.loaded.manifest.first_chunk

    @property
    def whole(self) -> int:
        """End of the run's whole chunks; at or before its start if the run cannot be cut."""
        manifest = self.loaded.manifest
        size, start = manifest.layout.chunk_tokens, self.first * manifest.layout.chunk_tokens
        if self.end % size == 0:
            return self.end
        return start + manifest.layout.cut(self.end // size * size - start, len(manifest.tokens))


def _cover(
    tokens: np.ndarray,
    paths: list[_ChainPath],
    size: int,
    candidates: list[_Match],
    pieces: Callable[[list[bytes], _ChainPath], list[_Match]],
) -> _Cover:
    """Finds how far `candidates` and partial chunks after them cover the prompt."""
    spans: list[Span] = []
    at, path = 0, paths[0]  # tokens covered, and whether all of that is exact
    while reach := [p for p in candidates if p.whole > at and _joins(p, at // size, spans)]:
        best = max(reach, key=lambda p: (p.whole, -p.first))
        _extend(spans, best, at // size, best.whole // size)
        at, path = best.whole, path if best.path is paths[0] else best.path
    # A partial chunk ends a prefix: the tail of a segment, or a segment of its own.
    chunk = at // size
    rest = [tokens[at : at + r] for r in range(1, min(size, len(tokens) - at + 1))]
    for tried in paths:
        if tried.turn <= chunk:
            before = tried.links[chunk]
            tails = [chain.link(before, part.astype("<i4").tobytes()) for part in rest]
            candidates = candidates + pieces(tails, tried)
    reach = [p for p in candidates if p.end > at and _joins(p, chunk, spans)]
    if reach:
        best = max(reach, key=lambda p: p.end)
        _extend(spans, best, chunk, -(-best.end // size))
        at, path = best.end, path if best.path is paths[0] else best.path
    return _Cover(tuple(spans), at, path)


def _match(loaded: Loaded, tokens: np.ndarray, path: _ChainPath) -> _Match | None:
    """Finds how far a segment agrees with the prompt: in whole chunks, or all of it."""
    manifest = loaded.manifest
    size, first = manifest.layout.chunk_tokens, manifest.first_chunk
    if not path.turn <= first < len(path.links) or manifest.start != path.links[first]:
        return None
    if manifest.provenance != path.provenance:
        return None
    start = first * size
    same = chain.common_length(manifest.tokens[: loaded.usable * size], tokens[start:])
    same = manifest.layout.cut(same, len(manifest.tokens))
    return _Match(loaded, start + same, path) if same else None


def _joins(piece: _Match, chunk: int, spans: Sequence[Span]) -> bool:
    """Whether the run may be entered at `chunk`, after `spans`; what is not in its order only at
    its start, or where it goes on itself."""
    manifest = piece.loaded.manifest
    if piece.first >= chunk or not (manifest.layout.reordered or manifest.layout.alike):
        return piece.first <= chunk
    return bool(spans) and spans[-1].segment_id == manifest.segment_id


def _extend(spans: list[Span], piece: _Match, first: int, end: int) -> None:
    """Append chunks [first, end) of the prefix, out of `piece`."""
    span = piece.loaded.manifest.span(piece.loaded.checksum, first - piece.first, end - first)
    if spans and spans[-1].segment_id == span.segment_id:
        before = spans.pop()  # the earlier run of the same segment ended where this one starts
        end = span.first_chunk + span.num_chunks
        span = replace(before, num_chunks=end - before.first_chunk)
    spans.append(span)


def resolve(loaded: Loaded, chunks: int, load: Load, salt: str | None = None) -> Prefix:
    """The prefix that ends with the first `chunks` chunks of a segment.

    Raises SegmentDamaged where a segment that it continues is gone, or is not what it continued, or
    the first one does not begin as one of this `salt` must; or where the tokens of those chunks are
    not the segment's first.
    """
    last = loaded.manifest
    layout, link = last.layout, last.links[chunks - 1]
    if not _cuts(last, chunks):
        raise SegmentDamaged(f"segment {last.segment_id}: cannot be cut at chunk {chunks}")
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


class Counters:
    """Named counts; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


class Index:
    """Finds segments and prefixes; thread-safe. The catalog proposes, the manifests decide, and
    chunks that turned out bad are left out."""

    def __init__(
        self,
        files: Files,
        counts: Counters,
        *,
        wait_s: float,
        readonly: bool = False,
        key: StoreKey | None = None,
    ) -> None:
        self._files = files
        self._key = key
        self._counts = counts
        self._lock = threading.Lock()
        self._bad: dict[tuple[str, str], set[int]] = {}  # (segment, checksum) → bad chunks
        self._unread: set[str] = set()
        self._manifests = ManifestCache(files, key)
        self.catalog = Catalog(
            files.catalog_path,
            self.describe,
            files.segment_ids,
            wait_s=wait_s,
            readonly=readonly,
        )
        self.catalog.reconcile()

    @property
    def unread(self) -> bool:
        """Whether there are, or may be, segments that the index lacks."""
        return bool(self._unread) or not self.catalog.listed

    def unknown(self) -> set[str]:
        """Ids of segments that the index lacks, as their manifests cannot be read. Raises
        StoreUnavailable while it is unknown which segments there are."""
        if self._unread or not self.catalog.listed:
            self._unread.clear()
            self.catalog.reconcile()
        if not self.catalog.listed:
            raise StoreUnavailable("the folder of segments cannot be read: nothing is evicted")
        return set(self._unread)

    # -- finding ---------------------------------------------------------------------------------

    def longest(
        self,
        tokens: np.ndarray,
        fingerprint: Fingerprint,
        layout: Layout,
        salt: str,
        *,
        provenance: str,
        marked: bool = False,
    ) -> Prefix:
        """The longest stored prefix of `tokens` int32 [T]; empty when nothing is stored.

        Exact KV serves any lookup, and what was made otherwise only one that asks for it. Links
        only propose segments: the tokens of every span are compared with the prompt's. With
        `marked`, chunks that are marked as bad count as stored.
        """
        size, load = layout.chunk_tokens, self.load_marked if marked else self.load
        whole = tokens[: len(tokens) // size * size]
        links = [chain.seed(fingerprint, layout, salt)]
        links += chain.links(links[0], whole, size)

        def pieces(firsts: list[bytes], path: _ChainPath) -> list[_Match]:
            ids = self.catalog.starting_with(firsts) if firsts else []
            found = (_match(loaded, tokens, path) for id_ in ids if (loaded := load(id_)))
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
            for id_ in self.catalog.starting_with(firsts) if firsts else []:
                turns.update((loaded.manifest.first_chunk,) if (loaded := load(id_)) else ())
            for turn in sorted(turns, reverse=True)[:_MOST_TURNS]:
                if turn < len(links):
                    onward = list(chain.links(branches[turn], whole[turn * size :], size))
                    path = _ChainPath([*links[:turn], branches[turn], *onward], turn, provenance)
                    more = pieces(onward, path)
                    cover = _cover(tokens, [exact, path], size, [*stored, *more], pieces)
                    best = max(best, cover, key=lambda c: c.end)  # the exact one at equal ends
        at, path = best.end, best.path
        end = path.links[at // size]
        if at % size:
            end = chain.link(end, tokens[at - at % size : at].astype("<i4").tobytes())
        self._counts.add("hits" if at else "misses")
        return Prefix(
            id=end.hex(),
            tokens=chain.as_tokens(tokens[:at]),
            spans=best.spans,
            layout=layout,
            fingerprint=fingerprint,
            salt=salt,
            provenance=path.provenance,
            exact_chunks=path.turn,
        )

    def prefix(self, prefix_id: str, salt: str | None = None) -> Prefix:
        """The stored prefix of an id, or the only one whose id starts so; where several segments
        hold it, one without bad chunks if there is one.

        Args:
          prefix_id: hex.
          salt: of the tenant whose it must be; other tenants' do not exist for it. None: any
            tenant's.

        Raises:
          StoreUnavailable: that is unknown now.
          PrefixNotFound: with close ids of the same tenant; of those without a salt where none is
            said; or with that of the prefix that it ends inside of, see `Layout.cut`.
        """
        whose = None if salt is None else chain.tenant_mark(salt)
        ids = [prefix_id] if is_id(prefix_id) else []
        if not ids:
            ends = self.catalog.ends(whose)
            ids = sorted({e for e in ends if prefix_id and e.startswith(prefix_id)})
        if len(ids) == 1:
            link, within, found = bytes.fromhex(ids[0]), "", None
            holders = self.catalog.ending_with(link, whose) + self.catalog.passing(link, whose)
            for segment_id in dict.fromkeys(holders):  # none of another tenant's is opened
                try:
                    loaded = self.find(segment_id)
                except StoreUnavailable:
                    if found is None:
                        raise
                    continue
                if loaded is None or link not in loaded.manifest.links:
                    continue
                if whose is None or loaded.manifest.tenant == whose:
                    chunks, manifest = loaded.manifest.links.index(link) + 1, loaded.manifest
                    if not _cuts(manifest, chunks):
                        within = manifest.links[-1].hex()
                        continue
                    with contextlib.suppress(SegmentDamaged):
                        prefix = resolve(loaded, chunks, self.find, salt)
                        if not len(self.marked_chunks(prefix)):
                            return prefix
                        found = found or prefix
            if found is not None:
                return found
            if within:
                raise PrefixNotFound(ids[0], [within], within=within)
        ends = sorted(set(self.catalog.ends(chain.PUBLIC if whose is None else whose)))
        if len(ids) > 1:
            named = set(ends)
            raise PrefixNotFound(prefix_id, [i for i in ids if i in named][:5], several=len(ids))
        close = [e for e in ends if prefix_id and e.startswith(prefix_id[:6])]
        close += difflib.get_close_matches(prefix_id[:64], ends[:1000], n=3, cutoff=0.4)
        raise PrefixNotFound(prefix_id, list(dict.fromkeys(close))[:5])

    def prefixes(self, salt: str | None = None) -> list[Prefix]:
        """Every prefix that no other continues, without damaged ones; None: of all tenants."""
        found = []
        whose = None if salt is None else chain.tenant_mark(salt)
        for id_ in self.catalog.leaves(whose):
            loaded = self.load(id_)
            if loaded is None or whose not in (None, loaded.manifest.tenant):
                continue
            with contextlib.suppress(SegmentDamaged):
                found.append(resolve(loaded, loaded.manifest.chunks, self.load, salt))
        return sorted(found, key=lambda p: p.id)

    # -- segments --------------------------------------------------------------------------------

    def find(self, segment_id: str, *, again: bool = False) -> Loaded | None:
        """A segment's checked manifest and usable chunks; None when it is gone or damaged. Raises
        StoreUnavailable while that is unknown. `again`: reads a manifest that the cache has."""
        if again:
            self._manifests.forget(segment_id)
        try:
            manifest, checksum = self._manifests.load(segment_id)
        except (SegmentDamaged, SegmentForeign):
            return None
        return Loaded(
            manifest, checksum, min(self.marks(manifest, checksum), default=manifest.chunks)
        )

    def load(self, segment_id: str) -> Loaded | None:
        """The same; also None, and counted, when it is unknown now."""
        try:
            return self.find(segment_id)
        except StoreUnavailable:
            self._counts.add("unread")
            return None

    def load_marked(self, segment_id: str) -> Loaded | None:
        """The same, with marked chunks among the usable."""
        found = self.load(segment_id)
        return found and Loaded(found.manifest, found.checksum, found.manifest.chunks)

    def marks(self, manifest: Manifest, checksum: str) -> set[int]:
        """Chunks of a segment that are marked as bad."""
        with self._lock:
            marks = set(self._bad.get((manifest.segment_id, checksum), ()))
        marks.update(self.catalog.quarantined(manifest.segment_id, checksum))
        return {chunk for chunk in marks if 0 <= chunk < manifest.chunks}

    def marked_chunks(self, prefix: Prefix) -> np.ndarray:
        """int64 [n]: the chunks of a prefix that are marked as bad, ascending."""
        found: list[int] = []
        start = 0
        for span in prefix.spans:
            local = (chunk - span.first_chunk for chunk in self.marked(span))
            found += [start + chunk for chunk in local if 0 <= chunk < span.num_chunks]
            start += span.num_chunks
        return np.sort(np.array(found, np.int64))

    def marked(self, span: Span) -> set[int]:
        """Chunks of a span's whole segment that are marked as bad."""
        loaded = self.load(span.segment_id)
        if loaded is None or loaded.checksum != span.checksum:
            return set()
        return self.marks(loaded.manifest, loaded.checksum)

    def manifest(self, segment_id: str, checksum: str) -> Manifest:
        """The manifest with this checksum; raises SegmentDamaged when it is gone or another."""
        manifest, found = self._manifests.load(segment_id)
        if found != checksum:
            raise SegmentDamaged(f"segment {segment_id}: replaced")
        return manifest

    def describe(self, ids: Iterable[str]) -> Iterator[Described]:
        """Manifest, checksum and size of segments, without those that are damaged or unread."""
        for id_, manifest, checksum, size in self.manifests(ids):
            if isinstance(manifest, Manifest):
                yield manifest, checksum, size
            elif isinstance(manifest, StoreUnavailable):
                self._unread.add(id_)
                self._counts.add("unread")
            else:
                self._counts.add("bad_manifests")

    def manifests(
        self, ids: Iterable[str]
    ) -> Iterator[tuple[str, Manifest | StoreError, str, int]]:
        """(id, manifest or what is wrong with it, its checksum, the segment's bytes)."""
        for id_, data in self._files.manifests(ids):
            if isinstance(data, StoreError):
                yield id_, data, "", 0
                continue
            try:
                manifest, checksum = Manifest.decode(data, id_, self._key)
            except StoreError as e:
                yield id_, e, "", 0
                continue
            yield id_, manifest, checksum, manifest.size(len(data))

    def add(self, manifest: Manifest, checksum: str, reservation: str | None = None) -> None:
        """Take in a segment that was just published; no reader has what it replaced."""
        self._manifests.forget(manifest.segment_id)
        self._forgive(manifest.segment_id, unless=checksum)
        described = manifest, checksum, manifest.size(len(manifest.encode()[0]))
        self.catalog.add(described, reservation)

    def drop(self, segment_id: str, reason: str) -> None:
        """Forget a segment that was removed, but why."""
        self._manifests.forget(segment_id)
        self._forgive(segment_id)
        self.catalog.drop(segment_id, reason)

    # -- quarantine ------------------------------------------------------------------------------

    def report(self, segment: Segment | None, chunks: list[tuple[int, str]], proof: bool) -> None:
        """Chunks could not be read, each with the reason: count them, and quarantine them where
        they are proven bad and the segment is there as it was. Without a `segment`, which could not
        be opened, `proof` says that it is gone."""
        if not proof:
            self._counts.add("unread", len(chunks))
            return
        self._counts.add("bad_packs", len(chunks))
        there = None
        try:
            if segment is not None:
                if not self._files.holding:
                    self._manifests.forget(segment.id)  # evictions elsewhere change no stamp
                there = self._manifests.load(segment.id)[1]
        except (SegmentDamaged, SegmentForeign):
            pass
        except StoreUnavailable:
            return
        if segment is None or there != segment.checksum:
            self._counts.add("gone", len(chunks))
            return
        for chunk, reason in chunks:
            self.quarantine(segment.id, segment.checksum, chunk, reason)

    def quarantine(self, segment_id: str, checksum: str, chunk: int, reason: str) -> None:
        """Serve a segment only up to a bad chunk from now on."""
        with self._lock:
            self._bad.setdefault((segment_id, checksum), set()).add(chunk)
        self._counts.add("quarantined")
        with contextlib.suppress(StoreClosed):  # a reader may outlive its store
            self.catalog.quarantine(segment_id, checksum, chunk, reason)

    def repaired(self, segment: Segment, manifest: Manifest) -> None:
        """Take in a segment some packs of which were written again; marks on them go."""
        checksum = manifest.encode()[1]
        left = {}
        for chunk in self.marks(segment.manifest, segment.checksum):
            with contextlib.suppress(StoreUnavailable):
                if segment.whole(manifest, chunk):
                    continue
            left[chunk] = "bad before other chunks were repaired"
        self._manifests.forget(segment.id)
        self._forgive(segment.id)
        self.catalog.repaired(segment.id, checksum, left)

    def pardon(self, segment_id: str) -> None:
        """Serve a segment in full again, after it was found to be whole."""
        self._forgive(segment_id)
        self.catalog.pardon(segment_id)

    def _forgive(self, segment_id: str, *, unless: str = "") -> None:
        """Forget marks on a segment, but not on the one with the checksum `unless`."""
        with self._lock:
            for key in [k for k in self._bad if k[0] == segment_id and k[1] != unless]:
                del self._bad[key]
