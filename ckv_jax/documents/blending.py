"""Blending: answers one question over several documents, in two passes.

The first pass is ProphetKV's stage 1: the question runs over what is stored, selects chunks period
by period, and its attention says which tokens matter. The second computes those again, in order
of position and with all that was selected in sight, and the question after them (CacheBlend's
frame: new keys and values stand where the stored ones would).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ckv_jax.buckets import bucket, chunk_bucket, suffix_bucket
from ckv_jax.config import Budget
from ckv_jax.documents.loading import (
    DocumentLoader,
    JoinedRows,
    OpenDocuments,
    UnreadableChunks,
    attended_chunks,
    recomputed_chunks,
    stored_chunks,
)
from ckv_jax.pipeline.layers import LayerKv
from ckv_jax.pipeline.recovery import RecoveryNeeded, recover
from ckv_jax.request import Blend
from ckv_jax.selection.base import Selection, Share
from ckv_jax.trace import Trace

_LEAST = 64  # rows of a buffer


class Prefilled(NamedTuple):
    """The first token of a sequence that shares no batch, and the KV that it goes on from."""

    logits: np.ndarray
    """float32 [1, V]."""
    token: int
    kv: list[LayerKv]
    """Each step's (K, V) [1, R, K*D], of a generation; else empty."""
    rows: int
    """Rows of them in use: the next token comes after those, at position `start + rows`."""
    start: int
    trace: Trace


@dataclass(slots=True, kw_only=True)
class _Pass:
    """The tokens that are computed together, in blocks."""

    tokens: np.ndarray
    positions: np.ndarray
    size: int
    hidden: list[Array] = field(default_factory=list)

    @property
    def blocks(self) -> list[slice]:
        """The places of each block's tokens."""
        count = len(self.tokens)
        return [slice(i, min(i + self.size, count)) for i in range(0, count, self.size)]

    @property
    def whole(self) -> Array:
        """The hidden states of all blocks, [1, S, E]."""
        return self.hidden[0] if len(self.hidden) == 1 else jnp.concatenate(self.hidden, axis=1)

    def padded(self, block: slice, values: np.ndarray, fill: int) -> np.ndarray:
        """`values` of a block's tokens int32 [S], S a bucket."""
        count = block.stop - block.start
        out = np.full(min(suffix_bucket(count), max(self.size, count)), fill, np.int32)
        out[:count] = values[block]
        return out


class BlendedRequest:
    """One question on its way. Engine thread only."""

    def __init__(
        self, loader: DocumentLoader, opened: OpenDocuments, suffix: np.ndarray,
        budget: Budget, blend: Blend, trace: Trace, *, keep: bool, block: int,
    ) -> None:  # fmt: skip
        """`suffix`: int32 [S]; `keep`: the keys and values, for a generation; `block`: tokens
        computed in one call at most."""
        self._runtime = loader.runtime
        self._loader = loader
        self._block = block
        self._opened = opened
        self._joined = opened.joined
        self._suffix = suffix
        self._budget = budget
        self._blend = blend
        self._trace = trace
        self._keep = keep
        self._lost = np.zeros(0, np.int64)
        self._scores: list[np.ndarray] = []
        self._selected: list[np.ndarray] = []
        self._new = self._lost
        """Chunks that are computed again."""
        self._kept: list[np.ndarray] = []
        """Those attended to as stored, period by period."""

    def answer(self) -> Generator[None, None, Prefilled]:
        """A block of work a `yield`, then the first token."""
        found = yield from self._first()
        while (more := self._more()) is not None:
            try:
                found = yield from self._second(*more)
                break
            except UnreadableChunks as error:
                self._lose(error)
        hidden, last, kv, rows = found
        logits, token = self._runtime.layers.head(hidden, np.array([last], np.int32))
        with self._trace.span("compute", lane="compute"):
            logits_, token_ = np.asarray(logits), int(np.asarray(token)[0])
        self._trace.end()
        start = self._joined.num_tokens + len(self._suffix) - rows
        return Prefilled(logits_, token_, kv, rows, start, self._request_trace())

    # -- the question over what is stored ---------------------------------------------------------

    def _first(self) -> Generator[None, None, tuple[Array, int, list[LayerKv], int]]:
        keep = self._keep and not self._blend.recompute
        asked = self._pass(np.zeros(0, np.int64))
        kv: list[LayerKv] = []
        rows = 0
        for period in range(self._runtime.plan.periods):
            while True:
                try:
                    scores, count = self._select(period, asked)
                    break
                except RecoveryNeeded as needed:
                    yield from recover(needed)
            while True:
                ids = attended_chunks(self._joined, scores, count, self._lost)
                try:
                    steps = self._load(period, ids, ids)
                    break
                except UnreadableChunks as error:
                    self._lose(error)
            self._scores.append(scores)
            self._selected.append(ids)
            rows = int(self._joined.length[ids].sum())
            places = rows + np.arange(len(self._suffix))
            yield
            yield from self._through(period, steps, asked, places)
            kv += steps if keep else []
        self._kept = self._selected
        return asked.hidden[-1], _last(asked), kv, rows + len(self._suffix)

    def _select(self, period: int, asked: _Pass) -> tuple[np.ndarray, int]:
        """The attention float32 [M] that each chunk gets, and how many chunks are selected."""
        runtime, opened, joined = self._runtime, self._opened, self._joined
        layers = runtime.plan.by_period[period].scoring
        by_prefix = [probes.get(layers, period) for probes in opened.probes]
        prefixes = [opened.prefixes[which] for which in opened.which]
        limit = self._budget.chunks(joined.num_chunks)
        mass, least = self._budget.mass or 1.0, self._budget.floor(joined.num_chunks)
        widths = [opened.probe_chunks for opened in prefixes]
        with self._trace.span("dispatch", lane="host"):
            selection: Selection = self._loader.calls.select(
                layers, asked.whole, joined.num_tokens, len(self._suffix), joined.offsets,
                [by_prefix[which] for which in opened.which],
                [one.num_tokens for one in joined.documents],
                [one.num_chunks for one in joined.documents], limit,
                Share(np.array([mass], np.float32), np.array([least], np.int32)),
                n=min(chunk_bucket(limit, joined.num_chunks), sum(widths)),
                window=runtime.system.reprefill.queries,
                chunk_tokens=runtime.system.chunk_tokens,
            )  # fmt: skip
        with self._trace.span("select", lane="host", period=period):
            ids, every = np.asarray(selection.ids)[0], np.asarray(selection.scores)[0]
        first = np.cumsum(widths) - widths
        scores = every[first[joined.document] + joined.chunk]
        return scores, int((ids >= 0).sum())

    # -- what is computed again, and the question after it ----------------------------------------

    def _more(self) -> tuple[np.ndarray, list[np.ndarray]] | None:
        """What the second pass computes again and what it attends to; None: there is none."""
        joined = self._joined
        most = max(int(joined.length[ids].sum()) for ids in self._selected)
        mean = np.mean(self._scores, axis=0)
        tokens = math.ceil(self._blend.recompute * most)  # any share is a chunk at least
        new = recomputed_chunks(joined, mean, tokens, self._blend.select, self._lost)
        if not len(new) and len({len(ids) for ids in self._selected}) == 1:
            return None
        return new, stored_chunks(joined, np.stack(self._scores), self._selected, new)

    def _second(
        self, new: np.ndarray, kept: list[np.ndarray]
    ) -> Generator[None, None, tuple[Array, int, list[LayerKv], int]]:
        asked = self._pass(new)
        kv: list[LayerKv] = []
        rows = 0
        for period, ids in enumerate(kept):
            every = np.union1d(ids, new)
            steps = self._load(period, every, ids)
            yield
            held = JoinedRows.of(self._joined, every)
            rows = len(held)
            places = np.concatenate([held.of_chunks(new), rows + np.arange(len(self._suffix))])
            yield from self._through(period, steps, asked, places)
            kv += steps if self._keep else []
        self._new, self._kept = new, kept
        return asked.hidden[-1], _last(asked), kv, rows + len(self._suffix)

    # -- both -------------------------------------------------------------------------------------

    def _pass(self, new: np.ndarray) -> _Pass:
        """The tokens of chunks `new` and of the suffix, embedded."""
        at = self._joined.positions(new)
        tokens = np.concatenate([self._joined.tokens[at], self._suffix]).astype(np.int32)
        positions = np.concatenate(
            [at, self._joined.num_tokens + np.arange(len(self._suffix))]
        ).astype(np.int32)
        made = _Pass(tokens=tokens, positions=positions, size=self._block)
        with self._trace.span("dispatch", lane="host"):
            for block in made.blocks:
                padded = made.padded(block, tokens, 0)
                made.hidden.append(self._runtime.layers.embed(padded[None]))
        return made

    def _load(self, period: int, every: np.ndarray, stored: np.ndarray) -> list[LayerKv]:
        """Buffers with room for chunks `every` and the suffix, `stored` ones of them filled in."""
        rows = JoinedRows.of(self._joined, every)
        capacity = bucket(len(rows) + len(self._suffix), least=_LEAST)
        return self._loader.load(self._opened, period, rows, stored, capacity, self._trace)

    def _through(
        self, period: int, steps: list[LayerKv], asked: _Pass, places: np.ndarray
    ) -> Generator[None, None, None]:
        """A period's layers over all blocks; `places`: each token's row in the buffers."""
        calls = self._loader.calls
        for index, step in enumerate(self._runtime.plan.by_period[period].steps):
            capacity = int(steps[index][0][0].shape[1])
            for number, block in enumerate(asked.blocks):
                context = min(capacity, bucket(int(places[block].max()) + 1, least=_LEAST))
                with self._trace.span("dispatch", lane="host"):
                    asked.hidden[number], steps[index] = calls.advance(
                        step.layers, asked.hidden[number],
                        asked.padded(block, asked.positions, 0),
                        asked.padded(block, places, capacity), steps[index], context=context,
                    )  # fmt: skip
                with self._trace.span("compute", lane="compute", period=period):
                    asked.hidden[number].block_until_ready()
                yield

    def _lose(self, error: UnreadableChunks) -> None:
        """Chunks that cannot be read are among those computed again."""
        lost = self._opened.everywhere(error)
        opened = self._opened.prefixes[error.which]
        self._trace.count("recomputed_chunks", len(lost), prefix=opened.prefix.id)
        self._lost = np.union1d(self._lost, lost)

    def _request_trace(self) -> Trace:
        """This request's view of the trace; records in the caches what was used."""
        joined, opened = self._joined, self._opened
        masses, selected, blended = [], [], 0
        for period, (scores, ids) in enumerate(zip(self._scores, self._kept, strict=True)):
            held = np.union1d(ids, self._new)
            masses.append(float(scores[held].sum() / max(scores.sum(), 1e-30)))
            selected.append(len(held))
            blended += int(joined.length[ids[joined.document[ids] > 0]].sum())
            for document, which in enumerate(opened.which):
                mine = ids[joined.document[ids] == document]
                if len(mine):
                    own = scores[joined.document == document]
                    used = opened.prefixes[which], _selection(joined.chunk[mine], own)
                    groups = self._runtime.plan.groups(period)
                    self._runtime.prefixes.record_all(groups, [used])
        self._trace.count("blended_tokens", round(blended / len(selected)))
        self._trace.count("recomputed_tokens", int(joined.length[self._new].sum()))
        total = joined.num_chunks * len(selected)
        return self._trace.share(selected=selected, total=total, attention_mass=masses)


def _selection(chunks: np.ndarray, scores: np.ndarray) -> Selection:
    """What one document's chunks got, as the caches' policies want it."""
    held = scores[chunks]
    mass = np.array([held.sum() / max(scores.sum(), 1e-30)])
    return Selection(ids=chunks[None], attention=held[None], mass=mass, scores=scores[None])  # type: ignore[arg-type]


def _last(asked: _Pass) -> int:
    """The place of the last token in the last block."""
    block = asked.blocks[-1]
    return int(block.stop - block.start - 1)
