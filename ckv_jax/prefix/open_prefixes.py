"""The prefixes that an engine serves: opened once, kept until they are evicted or replaced."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckv_jax.buckets import pad_rows
from ckv_jax.kernels_pallas.score.probe import Keys, Landmarks, Probe, TokenProbe
from ckv_jax.model.shardings import ONE_DEVICE, PROBE, Shardings
from ckv_jax.prefix.digest import Digest, device_digest
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.tiers import Tiers
from ckv_jax.selection.base import Selection
from ckv_jax.storage.digest import DigestData, as_float32, landmark_arrays, landmark_codes
from ckv_jax.storage.errors import CkvError
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.store import ChunkStore
from ckv_jax.trace import Trace

if TYPE_CHECKING:
    from ckv_jax.pipeline.recovery import Order, Recovered

MOST_KNOWN = 1024
"""Prefixes whose page tables stay in memory: about 100 kB each for 5,000 tokens of a 7B model."""


class OpenPrefixes:
    """The prefixes that are known, least recently used first; digests live under one byte budget.

    Engine thread only, except `segments`.
    """

    def __init__(
        self,
        store: ChunkStore,
        tiers: Tiers,
        *,
        digest_bytes: int,
        periods: int,
        recompute: Callable[[Prefix, Order], Recovered],
        deadline_s: float | None = None,
        shardings: Shardings = ONE_DEVICE,
    ) -> None:
        """`periods`: that a digest selects for; `recompute`: what is computed again of a prefix,
        given its order; `deadline_s`: of a read."""
        self._shardings = shardings
        self._store = store
        self._tiers = tiers
        self._periods = periods
        self._recompute = recompute
        self._deadline_s = deadline_s
        self.digest_budget = digest_bytes
        self.hold_at = 0.0
        """When `hold` may ask the store again, by `time.monotonic`, after it has failed."""
        self._segments: dict[tuple[str, str], tuple[int, int, int]] = {}
        """Of each segment, see `_key`: (first page, groups, chunks)."""
        self.more_pages: list[Callable[[OpenPrefix], np.ndarray]] = []
        """Each gives page numbers (int64) of what else caches may hold of a prefix."""
        self.forgotten: list[Callable[[str], None]] = []
        """Each gets the id of a segment that no known prefix has any more."""
        self._known: OrderedDict[str, OpenPrefix] = OrderedDict()
        self._in_use: dict[int, OpenPrefix] = {}

    # -- opening ----------------------------------------------------------------------------------

    def use(self, prefix: Prefix, room: int = 0) -> OpenPrefix:
        """`prefix` for one more user, who closes it; its digest has room for so many chunks.

        Nothing is asked of the store before something has to be read.
        """
        opened = self.known(prefix, room).share()
        self._in_use[id(opened)] = opened
        return opened

    def use_all(
        self,
        prefixes: Sequence[Prefix],
        use: Callable[[OpenPrefixes, Prefix], OpenPrefix],
        stack: ExitStack,
    ) -> tuple[list[OpenPrefix], list[int]]:
        """These prefixes as `use` opens them, each once, and which of them each one is.

        They are closed with `stack`. Raises what `use` raises.
        """
        places: dict[str, int] = {}
        found: list[OpenPrefix] = []
        which = []
        for prefix in prefixes:
            if prefix.id not in places:
                places[prefix.id] = len(found)
                found.append(use(self, prefix))
                stack.callback(found[-1].close)
            which.append(places[prefix.id])
        return found, which

    def known(self, prefix: Prefix, room: int = 0) -> OpenPrefix:
        """Returns the `OpenPrefix` of `prefix`, made at first use; its digest has `room` chunks."""
        opened = self._known.get(prefix.id)
        if opened is None or (
            opened.prefix is not prefix and opened.prefix != prefix
        ):  # stored again, in other segments
            before, opened = opened, self._make(prefix, room)
            self._known[prefix.id] = opened
            if before is not None:
                self._forget_unused()
        elif room > opened.room:
            chunks, opened.room = opened.probe_chunks, room
            if opened.probe_chunks != chunks:
                opened.digest = None  # padded to fewer
        self._known.move_to_end(prefix.id)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
            self._forget_unused()
        return opened

    def segments(self) -> set[str]:
        """The ids of the segments of all prefixes in use. Any thread."""
        used = list(self._in_use.values())
        return {span.segment_id for opened in used for span in opened.prefix.spans}

    def drop(self, prefix: Prefix) -> None:
        """Forgets a prefix that is served from other segments from now on."""
        opened = self._known.pop(prefix.id, None)
        if opened is not None:
            opened.digest = None
            self._forget_unused()

    def close(self) -> None:
        """Lets go of all digests, also where others know a prefix still."""
        for opened in self._known.values():
            opened.digest = None
        self._known.clear()

    def reader(self, prefix: Prefix) -> PrefixReader:
        return self._store.reader(prefix, deadline_s=self._deadline_s, lazily=True)

    def unused(self, opened: OpenPrefix) -> None:
        if not opened.users:
            del self._in_use[id(opened)]
        self._store.touch(opened.prefix)

    def recomputed(self, opened: OpenPrefix) -> Recovered:
        layout = opened.prefix.layout
        order = opened.order  # alone: what is recomputed may outlive `opened` and its digest
        if order is None and (layout.alike or layout.reordered):
            return self._recompute(opened.prefix, partial(self._order_of, opened.prefix))
        return self._recompute(opened.prefix, lambda _: order)

    def _order_of(self, prefix: Prefix, kv: np.ndarray | None = None) -> np.ndarray:
        """The order of a prefix; of alike tokens, found again by `kv` [L, 2, T, K, D] where that is
        given. Raises a `StoreError` if it is gone."""
        layout = prefix.layout
        with self._store.reader(prefix, deadline_s=self._deadline_s) as reader:
            if kv is None:
                return reader.order

            def keys(group: int, start: int, end: int) -> np.ndarray:
                layer, head = layout.group_layers(group)[0], layout.group_heads(group).start
                found: np.ndarray = kv[layer, 0, start:end, head]
                return found

            return reader.order_by(keys)

    # -- what selects -----------------------------------------------------------------------------

    def probes(self, opened: OpenPrefix, trace: Trace) -> Digest:
        """A prefix's digest, empty in a layout that has none.

        Raises `RecoveryNeeded` where the digest has to be computed again.
        """
        if opened.prefix.layout.digest == "none":
            return Digest({})
        return opened.digest or self._load_digest(opened, trace)

    def _load_digest(self, opened: OpenPrefix, trace: Trace) -> Digest:
        start = time.perf_counter_ns()
        try:
            data = opened.reader.read_digest()
        except CkvError:
            data = None  # late, or out of reach: a miss like any other
        layout = opened.prefix.layout
        if data is None:
            trace.count("recomputed_probes", self._periods)
            made = self._made_again if layout.digest == "means+cosines" else self._keys_of
            probes = made(opened)
        else:
            probes = self._on_device(opened, data)
        rows: dict[int, Probe] = dict(zip(layout.digest_layers, probes, strict=True))
        digest = Digest(rows)
        if data is not None:
            opened.digest = digest
            self._keep_within(opened)
            trace.count_bytes("ssd", data.nbytes, prefix=opened.prefix.id)
            trace.add("probe_io", "host", start, time.perf_counter_ns(), kind=data.kind)
        return digest

    def _on_device(self, opened: OpenPrefix, data: DigestData) -> list[TokenProbe | Landmarks]:
        size = opened.prefix.layout.chunk_tokens
        return device_digest(data, opened.probe_chunks, size, self._shardings)

    def _keys_of(self, opened: OpenPrefix) -> list[TokenProbe | Landmarks]:
        """The keys themselves, which select at least as well as a digest of them."""
        layout = opened.prefix.layout
        tokens = opened.probe_chunks * layout.chunk_tokens
        found: list[TokenProbe | Landmarks] = []
        for layer in layout.digest_layers:
            padded = pad_rows(np.ascontiguousarray(opened.recovered.keys(layer)), tokens)
            found.append(Keys(self._shardings.put(padded, PROBE)))
        return found

    def _made_again(self, opened: OpenPrefix) -> list[TokenProbe | Landmarks]:
        """A digest that does more than select, made again of all keys."""
        prefix, layout = opened.prefix, opened.prefix.layout
        codes = []
        for layer in layout.digest_layers:
            kept = np.ascontiguousarray(opened.recovered.keys(layer))
            exact = as_float32(kept.view(layout.disk_dtype), layout)
            codes.append(landmark_codes(exact, layout))
        arrays = landmark_arrays(np.stack(codes), layout, prefix.num_tokens)
        return self._on_device(opened, DigestData(layout.digest, arrays))

    @property
    def digest_bytes(self) -> int:
        """Device bytes of all digests."""
        return sum(opened.digest_bytes for opened in list(self._known.values()))

    def _keep_within(self, opened: OpenPrefix) -> None:
        """Lets go of others' digests until all together are within their budget."""
        total = self.digest_bytes
        for other in self._known.values():
            if total <= self.digest_budget:
                break
            if other is not opened and other.digest is not None:
                total -= other.digest_bytes
                other.digest = None

    def record_all(
        self, groups: range | np.ndarray, selected: Sequence[tuple[OpenPrefix, Selection]]
    ) -> None:
        """I_j += A_j and F_j += 1 for the packs of every critical chunk (§4.4); where the policy
        says so, I_j += A_j for the others.

        `groups` int [G]: the layer groups of a selection, or [J, G], of J selections, which stand
        one after the other in selections, -1 past their end. `selected`: each prefix once, with
        what its rows selected; a pack that several share is used once. Hits and misses are counted
        by where packs are now.
        """
        table = np.atleast_2d(np.asarray(groups))
        used, attention = [], []
        for opened, selection in selected:
            ids = np.asarray(selection.ids)
            row, column = np.nonzero(ids >= 0)
            of = table[row % len(table)].T  # [G, n], -1 where there is no group
            used.append(np.where(of >= 0, opened.pages(of, ids[row, column]), -1))
            attention.append(np.asarray(selection.attention)[row, column])
        self._tiers.record(*_summed(used, attention))
        self._observe_all(table, selected)

    def _observe_all(
        self, table: np.ndarray, selected: Sequence[tuple[OpenPrefix, Selection]]
    ) -> None:
        """Where the policy says so, I_j += A_j for packs that were scored and not selected."""
        if not self._tiers.observes:
            return
        part, place = np.nonzero(table >= 0)
        groups = table[part, place][:, None]
        for opened, selection in selected:
            ids = np.asarray(selection.ids)
            none = (ids < 0).all(axis=1, keepdims=True)
            scores = np.where(none, 0, np.asarray(selection.scores))[:, : opened.num_chunks]
            got = scores.reshape(-1, len(table), scores.shape[1]).sum(axis=0)
            row, column = np.nonzero(ids >= 0)
            got[row % len(table), ids[row, column]] = 0  # they count as used
            self._tiers.observe(opened.pages(groups, np.arange(opened.num_chunks)), got[part])

    def save_scores(self) -> None:
        """Persists importance and frequency of every segment seen, for a warm restart (§4.4)."""
        for segment in self._segments:
            self._save(segment)

    def _save(self, segment: tuple[str, str]) -> None:
        base, groups, chunks = self._segments[segment]
        importance, frequency = self._tiers.history(np.arange(base, base + groups * chunks))
        self._store.save_scores(
            segment[0], importance.reshape(groups, chunks), frequency.reshape(groups, chunks)
        )

    def _forget_unused(self) -> None:
        """Segments of no open prefix leave memory; the store keeps their scores."""
        prefixes = (*self._known.values(), *self._in_use.values())
        used = {_key(span, one.prefix.layout) for one in prefixes for span in one.prefix.spans}
        unused = [name for name in self._segments if name not in used]
        there = {id_ for id_, _ in used}  # a new form of a segment has scores of its own
        with suppress(CkvError):  # a disk that does not answer takes only hints, and time once
            for segment in unused:
                if segment[0] not in there:
                    self._save(segment)
        for segment in unused:
            base, groups, chunks = self._segments.pop(segment)
            self._tiers.forget(base, groups * chunks)
            for forget in self.forgotten:
                forget(segment[0])

    def _make(self, prefix: Prefix, room: int) -> OpenPrefix:
        layout = prefix.layout
        first, stride = [], []
        for span in prefix.spans:
            chunks = span.segment_chunks
            base = self._register(_key(span, layout), layout.groups, chunks)
            first.append(base + span.first_chunk + np.arange(span.num_chunks, dtype=np.int64))
            stride.append(np.full(span.num_chunks, chunks, np.int64))
        size = layout.chunk_tokens
        lengths = np.full(prefix.num_chunks, size, np.int32)
        lengths[-1] = prefix.num_tokens - size * (prefix.num_chunks - 1)
        return OpenPrefix(
            prefix=prefix,
            first_page=np.concatenate(first),
            page_stride=np.concatenate(stride),
            chunk_lengths=lengths,
            room=room,
            life=self,
        )

    def _register(self, segment: tuple[str, str], groups: int, chunks: int) -> int:
        if segment not in self._segments:
            scores = None
            with suppress(CkvError):  # as in `_forget_unused`
                scores = self._store.load_scores(segment[0])
            base = self._tiers.register(groups * chunks, *(scores or ()))
            self._segments[segment] = (base, groups, chunks)
        return self._segments[segment][0]


def _key(span: Span, layout: Layout) -> tuple[str, str]:
    """The name of a segment's pages: its id; its checksum, too, of alike tokens, as they may be in
    other chunks when they are stored again."""
    return span.segment_id, span.checksum if layout.alike else ""


def _summed(
    pages: Sequence[np.ndarray], attention: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Each page once, ascending int64 [m], with the sum of what it was given, float64 [m], of
    `pages` [G, n] (-1: none) that were given `attention` [n] each."""
    given = [(of >= 0) * got for of, got in zip(pages, attention, strict=True)]  # for each group
    every, got = np.concatenate(pages, axis=None), np.concatenate(given, axis=None)
    real = every >= 0
    every, got = every[real], got[real]
    each, where = np.unique(every, return_inverse=True)
    return each, np.bincount(where, got, len(each))
