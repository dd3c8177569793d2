"""What the engine keeps of the prefixes it serves: page numbers, lengths, digests on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import jax
import numpy as np

from ckv_jax.buckets import pad_rows
from ckv_jax.cache.tiers import Tiers
from ckv_jax.kernels_pallas.score.probe import (
    BoundKeys,
    Int4Keys,
    Int8Keys,
    Landmarks,
    MeanKeys,
    PqKeys,
    Probe,
    TokenProbe,
)
from ckv_jax.model.shardings import CODEBOOKS, ONE_DEVICE, PROBE, Shardings
from ckv_jax.reads.digest import Digest
from ckv_jax.reads.probe_source import ProbeView
from ckv_jax.reads.resident import Resident
from ckv_jax.selection.base import Selection
from ckv_jax.storage.digest.data import DigestData
from ckv_jax.storage.layout_versions import LANDMARKS
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.probe_pages import ProbePages
from ckv_jax.storage.store import ChunkStore

MOST_RESIDENTS = 1024
"""Prefixes whose page tables stay in memory: about 100 kB each for 5,000 tokens of a 7B model."""


class Residents:
    """The prefixes in use, least recently used first; digests live under one byte budget."""

    def __init__(
        self,
        store: ChunkStore,
        tiers: Tiers,
        *,
        digest_bytes: int,
        shardings: Shardings = ONE_DEVICE,
        turns: bool = False,
    ) -> None:
        """`turns`: see `Digest`."""
        self._shardings = shardings
        self._turns = turns
        self._store = store
        self._tiers = tiers
        self._budget = digest_bytes
        self._segments: dict[str, tuple[int, int, int]] = {}  # -> (first page, groups, chunks)
        self._probes: dict[str, dict[tuple[int, int] | None, tuple[int, int]]] = {}
        """Of each segment (first page, pages): None: the pages that it is cut into itself; those of
        (first chunk, chunks) that some prefix cuts otherwise."""
        self._known: OrderedDict[str, Resident] = OrderedDict()
        self._in_use: dict[int, Resident] = {}  # by a number of their own
        self._uses = count()

    @contextmanager
    def using(self, prefix: Prefix, room: int = 0) -> Iterator[Resident]:
        """The resident of `prefix`, whose pages keep their numbers until the context is left; its
        probe has room for so many chunks."""
        resident, use = self.open(prefix, room), next(self._uses)
        self._in_use[use] = resident
        try:
            yield resident
        finally:
            del self._in_use[use]

    def open(self, prefix: Prefix, room: int = 0) -> Resident:
        """The resident of `prefix`, made on first use; its probe has room for so many chunks."""
        resident = self._known.get(prefix.id)
        if resident is None or resident.prefix != prefix:  # stored anew, in other segments
            resident = self._known[prefix.id] = self._make(prefix, room)
        self._known.move_to_end(prefix.id)
        while len(self._known) > MOST_RESIDENTS:
            self._known.popitem(last=False)
            self._forget_unused()
        return resident

    @property
    def digest_bytes(self) -> int:
        """Device bytes of all resident digests."""
        return sum(resident.digest_bytes for resident in list(self._known.values()))

    def close(self) -> None:
        """Lets go of all digests."""
        self._known.clear()

    def drop(self, prefix: Prefix) -> None:
        """Forgets a prefix that is served from other segments from now on."""
        if self._known.pop(prefix.id, None) is not None:
            self._forget_unused()

    def keep_digest(self, resident: Resident, data: DigestData) -> None:
        """Puts a digest on the device; others make room until the byte budget holds."""
        layout = resident.prefix.layout
        size = layout.chunk_tokens
        probes = device_digest(data, resident.probe_chunks, size, self._shardings)
        rows = dict(zip(layout.digest_layers, probes, strict=True))
        resident.digest = self.digest_of(rows)
        self._keep_within(resident)

    def _keep_within(self, resident: Resident) -> None:
        """Lets go of others' digests until all together are within their budget."""
        total = self.digest_bytes
        for other in self._known.values():
            if total <= self._budget:
                break
            if other is not resident and other.digest is not None:
                total -= other.digest_bytes
                other.digest = None

    def digest_of(self, probes: dict[int, TokenProbe | Landmarks]) -> Digest:
        """A digest of these probes, layer by layer, that no resident keeps."""
        return Digest({**probes}, self._turns)

    def rough(self, resident: Resident, digest: Digest, layers: Sequence[int]) -> list[Probe]:
        """What a coarse pass of decode scores of some layers; what is made for that counts as part
        of the digest."""
        before = digest.nbytes
        found = digest.rough(layers)
        if digest.nbytes != before:
            self._keep_within(resident)
        return found

    def record_all(
        self, groups: range | np.ndarray, chosen: Sequence[tuple[Resident, Selection]]
    ) -> None:
        """I_j += A_j and F_j += 1 for the packs of every critical chunk (§4.4); where the policy
        says so, I_j += A_j for the others.

        `groups` int [G]: the layer groups of a choice, or [J, G], of J choices, which stand one
        after the other in selections, -1 past their end. `chosen`: each prefix once, with what its
        rows chose; a pack that several share is used once. Hits and misses are counted by where
        packs are now.
        """
        table = np.atleast_2d(np.asarray(groups))
        used, attention = [], []
        for resident, selection in chosen:
            ids = np.asarray(selection.ids)
            row, column = np.nonzero(ids >= 0)
            used.append(_pages(resident, table[row % len(table)].T, ids[row, column]))
            attention.append(np.asarray(selection.attention)[row, column])
        self._tiers.record(*_summed(used, attention))
        self._observe_all(table, chosen)

    def _observe_all(self, table: np.ndarray, chosen: Sequence[tuple[Resident, Selection]]) -> None:
        """Where the policy says so, I_j += A_j for packs that were scored and not chosen."""
        if not self._tiers.observes:
            return
        seen, attention = [], []
        for resident, selection in chosen:
            ids = np.asarray(selection.ids)
            rest = np.ones((len(table), resident.num_chunks), bool)
            row, column = np.nonzero(ids >= 0)
            rest[row % len(table), ids[row, column]] = False
            none = (ids < 0).all(axis=1, keepdims=True)
            scores = np.where(none, 0, np.asarray(selection.scores))
            got = scores.reshape(-1, len(table), scores.shape[1]).sum(axis=0)
            choice, chunk = np.nonzero(rest)
            seen.append(_pages(resident, table[choice].T, chunk))
            attention.append(got[choice, chunk])
        self._tiers.observe(*_summed(seen, attention))

    def record_probe(
        self, resident: Resident, row: int, attention: np.ndarray | None = None
    ) -> None:
        """One use of every page of a probe row: I_j is the attention `[M]` of its chunks together,
        chosen or not, as all of its keys took part; None: 1."""
        assert resident.probe is not None
        held = resident.probe.held
        share: np.ndarray = np.ones(len(held))
        if attention is not None:
            page = held.place // held.prefix.layout.probe_page_chunks
            share = np.bincount(page, weights=attention[: len(page)], minlength=len(held))
        self._tiers.record(resident.probe_pages(row), share)

    def carry_scores(
        self,
        resident: Resident,
        order: np.ndarray | None,
        new: Prefix,
        new_order: np.ndarray | None,
    ) -> None:
        """Persists for the segments of `new` what is known of `resident`, which has the same tokens
        in another order: each chunk gets the mean importance and frequency of its tokens, which is
        that of the chunks where they were. Orders int [L, T], None: as the tokens are.

        Segments in use keep what they have.
        """
        layout, every = new.layout, np.arange(resident.num_chunks)
        size, tokens = layout.chunk_tokens, new.num_tokens
        starts, lengths = every * size, resident.chunk_lengths
        shape = (layout.groups, len(every))
        importance, frequency = np.zeros(shape, np.float32), np.zeros(shape, np.uint32)
        for group in range(layout.groups):
            layer = layout.group_layers(group)[0]
            values = np.stack(self._tiers.history(resident.pages(group, every))).astype(np.float64)
            stored = np.repeat(values, size, axis=1)[:, :tokens]
            known = np.empty_like(stored)
            known[:, slice(None) if order is None else order[layer]] = stored
            moved = known if new_order is None else known[:, new_order[layer]]
            means = np.add.reduceat(moved, starts, axis=1) / lengths
            importance[group], frequency[group] = means[0], np.rint(means[1])
        first = 0
        for span in new.spans:
            part = slice(first, first + span.num_chunks)
            if span.segment_id not in self._segments and span.num_chunks == span.segment_chunks:
                parts = importance[:, part], frequency[:, part]
                self._store.save_scores(span.segment_id, *parts)
            first = part.stop

    def save_scores(self) -> None:
        """Persists importance and frequency of every segment seen, for a warm restart (§4.4)."""
        for segment in self._segments:
            self._save(segment)

    def _save(self, segment: str) -> None:
        base, groups, chunks = self._segments[segment]
        importance, frequency = self._tiers.scores(base, groups * chunks)
        self._store.save_scores(
            segment, importance.reshape(groups, chunks), frequency.reshape(groups, chunks)
        )

    def _forget_unused(self) -> None:
        """Segments of no resident leave memory; the store keeps their scores."""
        residents = (*self._known.values(), *self._in_use.values())
        used = {span.segment_id for resident in residents for span in resident.prefix.spans}
        for segment in [name for name in self._segments if name not in used]:
            self._save(segment)
            base, groups, chunks = self._segments.pop(segment)
            self._tiers.forget(base, groups * chunks)
            for first, pages in self._probes.pop(segment, {}).values():
                self._tiers.forget(first, pages)

    def _make(self, prefix: Prefix, room: int) -> Resident:
        layout = prefix.layout
        first, stride = [], []
        for span in prefix.spans:
            chunks = span.segment_chunks
            base = self._register(span.segment_id, layout.groups, chunks)
            first.append(base + span.first_chunk + np.arange(span.num_chunks, dtype=np.int64))
            stride.append(np.full(span.num_chunks, chunks, np.int64))
        size = layout.chunk_tokens
        lengths = np.full(prefix.num_chunks, size, np.int32)
        lengths[-1] = prefix.num_tokens - size * (prefix.num_chunks - 1)
        return Resident(
            prefix=prefix,
            first_page=np.concatenate(first),
            page_stride=np.concatenate(stride),
            chunk_lengths=lengths,
            probe=self._probe_view(prefix) if layout.probe_layers else None,
            room=room,
        )

    def _probe_view(self, prefix: Prefix) -> ProbeView:
        """Pages of probe keys; what they are worth is not persisted: every request tells anew."""
        held, layout = ProbePages(prefix), prefix.layout
        first, stride = np.zeros((2, len(held)), np.int64)
        for page in range(len(held)):
            span = prefix.spans[int(held.span[page])]
            known = self._probes.setdefault(span.segment_id, {})
            whole = held.whole(page)
            key = None if whole else (int(held.first[page]), int(held.chunks[page]))
            stride[page] = -(-span.segment_chunks // layout.probe_page_chunks) if whole else 1
            if key not in known:
                count = len(layout.probe_layers) * int(stride[page])
                known[key] = self._tiers.register(count), count
            first[page] = known[key][0]
            if whole:
                first[page] += held.first[page] // layout.probe_page_chunks
        return ProbeView(held, first, stride)

    def _register(self, segment: str, groups: int, chunks: int) -> int:
        if segment not in self._segments:
            scores = self._store.load_scores(segment)
            base = self._tiers.register(groups * chunks, *(scores or ()))
            self._segments[segment] = (base, groups, chunks)
        return self._segments[segment][0]


def _pages(resident: Resident, groups: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Pages int64 [G, n] of chunks [n] in layer groups [G, n], -1 where there is no group."""
    pages: np.ndarray = np.where(groups >= 0, resident.pages(groups, chunks), -1)
    return pages


def _summed(
    pages: Sequence[np.ndarray], attention: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Each page once, int64 [m] in any order, with the sum of what it was given, float64 [m], of
    `pages` [G, n] (-1: none) that were given `attention` [n] each."""
    given = [np.broadcast_to(got, of.shape) for of, got in zip(pages, attention, strict=True)]
    every, got = np.concatenate(pages, axis=None), np.concatenate(given, axis=None)
    real = every >= 0
    every, got = every[real], got[real]
    ordered = np.sort(every)
    if (ordered[1:] != ordered[:-1]).all():  # a tenth of the time
        return every, got.astype(np.float64)
    each, where = np.unique(every, return_inverse=True)
    return each, np.bincount(where, got, len(each))


def device_digest(
    data: DigestData, chunks: int, chunk_tokens: int, shardings: Shardings = ONE_DEVICE
) -> list[TokenProbe | Landmarks]:
    """A stored digest as one device probe a row, padded to so many chunks."""
    arrays = data.arrays
    entries = chunks * (1 if data.kind in LANDMARKS else chunk_tokens)

    def codes(row: int, name: str = "codes") -> jax.Array:
        padded: jax.Array = shardings.put(pad_rows(arrays[name][row], entries), PROBE)
        return padded

    rows = range(len(next(iter(arrays.values()))))
    match data.kind:
        case "int8":
            return [Int8Keys(codes(row), codes(row, "scale")) for row in rows]
        case "int4":
            return [Int4Keys(codes(row), codes(row, "scale")) for row in rows]
        case "pq":
            books = [shardings.put(book, CODEBOOKS) for book in arrays["codebooks"]]
            return [PqKeys(codes(row), books[row]) for row in rows]
        case "means" | "means+cosines":
            return [
                MeanKeys(
                    codes(row, "mean"),
                    codes(row, "log_size"),
                    oddity=codes(row, "oddity") if "oddity" in arrays else None,
                )
                for row in rows
            ]
        case "bounds":
            return [BoundKeys(codes(row, "low"), codes(row, "high")) for row in rows]
    raise ValueError(f"got a digest of unknown kind {data.kind!r}")
