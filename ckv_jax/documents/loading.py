"""Concatenation of several documents: their chunks, and their packs as rows of one buffer, with
keys rotated to the new positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from ckv_jax.errors import UnsupportedModel
from ckv_jax.kernels_pallas.attend import attend_upto
from ckv_jax.kernels_pallas.score import score_together
from ckv_jax.kernels_pallas.score.probe import Landmarks, Probe
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Layer
from ckv_jax.model.rope import Llama3Scaling, YarnScaling, apply_rope, inverse_frequencies
from ckv_jax.model.shardings import BY_NAME, HEADS, PAGES, WHOLE, Shardings
from ckv_jax.pipeline.executor import Runtime
from ckv_jax.pipeline.layers import LayerKv, Layers, LayerState
from ckv_jax.pipeline.plan import Step
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix, Source
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import as_bits, as_rows, positions
from ckv_jax.prefix.prefetcher import PackReader
from ckv_jax.request import Recompute
from ckv_jax.selection.base import Selection, Share, last_queries, select_units
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

_TURNING = (YarnScaling, Llama3Scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedDocuments:
    """Chunks of all documents, numbered through in order: [M] of each kind."""

    documents: tuple[Prefix, ...]
    offsets: np.ndarray
    """int64 [n]: position of each document's first token."""
    document: np.ndarray
    """int64 [M]: the document of each chunk."""
    chunk: np.ndarray
    """int64 [M]: its number within the document."""
    first: np.ndarray
    """int64 [M]: position of its first token."""
    length: np.ndarray
    """int64 [M]: its tokens; fewer than a chunk has only where a document ends."""

    @classmethod
    def of(cls, documents: Sequence[Prefix]) -> JoinedDocuments:
        """Documents of at least one token each, of one layout, in this order."""
        size = documents[0].layout.chunk_tokens
        counts = [one.num_chunks for one in documents]
        offsets = np.cumsum([0] + [one.num_tokens for one in documents])
        document = np.repeat(np.arange(len(documents)), counts)
        chunk = np.concatenate([np.arange(count) for count in counts])
        first = offsets[document] + size * chunk
        return cls(
            documents=tuple(documents),
            offsets=offsets[:-1],
            document=document,
            chunk=chunk,
            first=first,
            length=np.minimum(size, offsets[document + 1] - first),
        )

    @property
    def num_tokens(self) -> int:
        """T, of all documents."""
        return int(self.first[-1] + self.length[-1])

    @property
    def num_chunks(self) -> int:
        """M."""
        return len(self.chunk)

    @property
    def ends(self) -> np.ndarray:
        """The chunks that hold fewer tokens than others: [m]."""
        return np.flatnonzero(self.length < self.documents[0].layout.chunk_tokens)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]."""
        return np.concatenate([one.tokens for one in self.documents])

    def positions(self, chunks: np.ndarray) -> np.ndarray:
        """Those of all tokens of some chunks, int64 [n], in the chunks' order."""
        return _runs(self.first[chunks], self.length[chunks])


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows:
    """A buffer whose rows are the tokens of some chunks, in order of position."""

    chunk: np.ndarray
    """int64 [R]: the chunk of each row."""
    within: np.ndarray
    """int64 [R]: the row's place within its chunk."""

    @classmethod
    def of(cls, joined: JoinedDocuments, chunks: np.ndarray) -> JoinedRows:
        """The rows of `chunks`, ascending."""
        lengths = joined.length[chunks]
        return cls(
            chunk=np.repeat(chunks, lengths),
            within=_runs(np.zeros(len(chunks), np.int64), lengths),
        )

    def __len__(self) -> int:
        return len(self.chunk)

    def of_chunks(self, chunks: np.ndarray) -> np.ndarray:
        """The rows int64 [n] of some of the chunks, ascending."""
        return np.flatnonzero(np.isin(self.chunk, chunks))


def _runs(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... length[0] of them, then those of the next."""
    before = np.cumsum(length) - length
    runs: np.ndarray = np.arange(int(length.sum())) + np.repeat(first - before, length)
    return runs


def best_chunks(scores: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """The `count` best of the chunks `among` by `scores` [M], ascending; of equals the earlier."""
    order = np.argsort(-scores[among], kind="stable")
    return np.sort(among[order[:count]])


def attended_chunks(
    joined: JoinedDocuments, scores: np.ndarray, count: int, lost: np.ndarray
) -> np.ndarray:
    """About `count` chunks for one selection, ascending: the ends of the documents, which may be
    short, and the best others, as many in every period. None of `lost` is among them."""
    must = np.setdiff1d(joined.ends, lost)
    among = np.setdiff1d(np.arange(joined.num_chunks), np.concatenate([must, lost]))
    return np.union1d(must, best_chunks(scores, among, max(0, count - len(must))))


def recomputed_chunks(
    joined: JoinedDocuments, scores: np.ndarray, tokens: int, select: Recompute, lost: np.ndarray
) -> np.ndarray:
    """The chunks, ascending, to be computed again: `lost` ones, and others of the documents after
    the first as long as they hold no more than `tokens`, but one if that is not 0.

    "attended": in order of `scores` [M] (ProphetKV: the mean over all layers of the question's
    attention). "first": the first chunk of each document, then the second of each (EPIC). "both":
    as "attended", after the first chunk of each document.
    """
    later = np.setdiff1d(np.flatnonzero(joined.document > 0), lost)
    number, worth = joined.chunk[later], scores[later]
    keys = {
        "attended": (-worth,),
        "first": (number,),
        "both": (-worth, number > 0),  # the last key counts first
    }
    order = later[np.lexsort(keys[select])]
    fitting = np.cumsum(joined.length[order]) <= tokens
    return np.union1d(order[: max(int(fitting.sum()), min(1, tokens))], lost)


def stored_chunks(
    joined: JoinedDocuments, scores: np.ndarray, selected: Sequence[np.ndarray], new: np.ndarray
) -> list[np.ndarray]:
    """What is attended to as stored besides the chunks `new`, period by period, ascending.

    What each period selected, and the chunk before each of `new`, on which its first tokens
    lean. All periods get as many tokens, those that lack some their next best chunks by
    `scores` [periods, M].
    """
    before = np.setdiff1d(new[new > 0] - 1, new)
    kept = [np.union1d(np.setdiff1d(ids, new), before) for ids in selected]
    short = np.setdiff1d(joined.ends, new)
    kept = [np.union1d(ids, short) for ids in kept]
    most = max(map(len, kept))
    every = np.setdiff1d(np.arange(joined.num_chunks), new)
    return [
        np.union1d(ids, best_chunks(row, np.setdiff1d(every, ids), most - len(ids)))
        for ids, row in zip(kept, scores, strict=True)
    ]


def check_rotates(config: ModelConfig) -> None:
    """Raises `UnsupportedModel` for positions whose keys cannot be moved by a rotation."""
    scaling = config.rope_scaling
    if scaling is not None and not isinstance(scaling, _TURNING):
        raise UnsupportedModel(
            f"got rope scaling {type(scaling).__name__}, expected none, yarn or llama3: keys of "
            "other positions cannot be rotated to another place"
        )


def rotations(
    config: ModelConfig, offsets: Sequence[int]
) -> tuple[Float32[np.ndarray, "n D"], Float32[np.ndarray, "n D"]]:
    """Tables with which `model.rope.apply_rope` moves keys by `offsets` tokens, a row for each.

    In float64 from the model's own float32 frequencies: at tens of thousands of tokens a float32
    angle is off by a thousandth of a radian.
    """
    frequencies, _ = inverse_frequencies(config)
    angles = np.asarray(offsets, np.float64)[:, None] * frequencies.astype(np.float64)[None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    tables = np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
    return tables[0].astype(np.float32), tables[1].astype(np.float32)


class DocumentCalls:
    """Over the layers of one model; all engines over it share what is compiled."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        jit, split, once = layers.programs.jit, layers.split, layers.once
        selected = once(_select_of, layers.layer_of, layers.shardings)
        self._select = jit(
            split(selected, (BY_NAME, WHOLE, WHOLE, WHOLE, BY_NAME), WHOLE),
            static=("n", "window", "chunk_tokens"),
        )
        bring = once(_bring_of, layers.dtype, layers.config.head_dim)
        self.bring = jit(split(bring, (HEADS, PAGES), HEADS), donate=("buffers",))
        """See `_bring_of`."""
        advance = once(_advance_of, layers.layer_of)
        self._advance = jit(
            split(advance, (BY_NAME, WHOLE, WHOLE, WHOLE, HEADS), (WHOLE, HEADS)),
            static=("context",), donate=("buffers",),
        )  # fmt: skip

    def buffers(self, layers: range, rows: int) -> LayerKv:
        """Zeros for each layer's (K, V) [1, R, K*D] of several documents."""
        config = self._layers.config
        shape = (1, rows, config.num_kv_heads * config.head_dim)
        put, dtype = self._layers.shardings.put, self._layers.kv_dtype
        zeros = [put(jnp.zeros(shape, dtype), HEADS) for _ in range(2 * len(layers))]
        return tuple(zip(zeros[::2], zeros[1::2], strict=True))

    def select(
        self,
        layers: Sequence[int],
        hidden: Float[Array, "1 S E"],
        start: int,
        length: int,
        offsets: np.ndarray,
        probes: Sequence[Sequence[Probe]],
        num_tokens: Sequence[int],
        num_chunks: Sequence[int],
        limit: int,
        share: Share,
        *,
        n: int,
        window: int | None,
        chunk_tokens: int,
    ) -> Selection:
        """The best chunks of all documents for a question of `length` tokens at position `start`.

        `probes[i]`: of document i, one for each layer, whose scores are summed. Chunks are numbered
        document after document as the probes are long.
        """
        found: Selection = self._select(
            tuple(self._layers.state(layer) for layer in layers), hidden,
            np.array([start], np.int32), np.array([length], np.int32),
            tuple(map(tuple, probes)), offsets.astype(np.int32),
            np.array(num_tokens, np.int32), np.array(num_chunks, np.int32),
            np.array([limit], np.int32), share, n=n, window=window, chunk_tokens=chunk_tokens,
        )  # fmt: skip
        return found

    def advance(
        self,
        layers: range,
        hidden: Float[Array, "1 S E"],
        at: Int32[np.ndarray, " S"],
        rows: Int32[np.ndarray, " S"],
        buffers: LayerKv,
        *,
        context: int,
    ) -> tuple[Float[Array, "1 S E"], LayerKv]:
        """`layers` over tokens at positions `at`, which get `rows` of the (donated) buffers.

        A token attends to the rows up to its own, of the first `context`, so rows are in order of
        position; a row past the buffers' end is no token's.
        """
        states = tuple(self._layers.state(layer) for layer in layers)
        out, kept = self._advance(states, hidden, at, rows, buffers, context=context)
        return out, kept


def _select_of(
    layer_of: Callable[[LayerState], Layer], shardings: Shardings
) -> Callable[..., Selection]:
    def select_together(
        states: tuple[LayerState, ...], hidden: Array, start: Array, length: Array,
        probes: tuple[tuple[Probe, ...], ...], offsets: Array, num_tokens: Array,
        num_chunks: Array, limits: Array, share: Share, *, n: int, window: int | None,
        chunk_tokens: int,
    ) -> Selection:  # fmt: skip
        hidden, at, lengths = last_queries(
            hidden, positions(start, hidden.shape[1]), length, window
        )
        scores: Array = jnp.zeros((), jnp.float32)
        for index, state in enumerate(states):
            layer = layer_of(state)
            scores = scores + score_together(
                [layer.query(hidden, at - offsets[document]) for document in range(len(probes))],
                [mine[index] for mine in probes],
                num_tokens=num_tokens, q_length=lengths[0], chunk_tokens=chunk_tokens,
            )  # fmt: skip
        scores = shardings.sum(scores)
        held = []
        for document, mine in enumerate(probes):
            units = _chunks(mine[0], chunk_tokens)
            held.append(jnp.arange(units, dtype=jnp.int32) < num_chunks[document])
        scores = jnp.where(jnp.concatenate(held)[None], scores, -jnp.inf)
        return select_units(scores, n, limits, share=share)

    return select_together


def _chunks(probe: Probe, chunk_tokens: int) -> int:
    return probe.shape[0] // (1 if isinstance(probe, Landmarks) else chunk_tokens)


def _bring_of(dtype: jnp.dtype, dim: int) -> Callable[..., LayerKv]:
    """(Donated) buffers with tokens out of the pool, keys rotated to their places.

    Row r gets the token `within[r]` of the packs in `slots[:, r]`, rotated by row `document[r]` of
    `tables`; where the slot is -1 it stays as it is.
    """

    def bring(
        buffers: LayerKv, pages: Array, slots: Array, within: Array,
        tables: tuple[Array, Array], document: Array,
    ) -> LayerKv:  # fmt: skip
        _, pack, _, chunk, width = pages.shape
        flat = pages.reshape(-1, width)
        cos, sin = (table[document][None] for table in tables)  # [1, R, D]
        out = []
        for index, (keys, values) in enumerate(buffers):
            slot = slots[index // pack]
            row = ((slot * pack + index % pack) * 2) * chunk + within
            there = (slot >= 0)[None, :, None]
            stored = as_bits(jnp.take(flat, row, axis=0, mode="clip"), dtype)
            wide = stored.reshape(1, len(row), -1, dim).astype(jnp.float32)
            moved = as_bits(as_rows(apply_rope(wide, cos, sin).astype(dtype)), keys.dtype)
            other = jnp.take(flat, row + chunk, axis=0, mode="clip")[None]
            other = as_bits(other, values.dtype)
            out.append((jnp.where(there, moved, keys), jnp.where(there, other, values)))
        return tuple(out)

    return bring


def _advance_of(
    layer_of: Callable[[LayerState], Layer],
) -> Callable[..., tuple[Array, LayerKv]]:
    def advance(
        states: tuple[LayerState, ...], hidden: Array, at: Array, rows: Array, buffers: LayerKv,
        *, context: int,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        after: list[tuple[Array, Array]] = []
        for index, state in enumerate(states):

            def over_rows(q: Array, k: Array, v: Array, index: int = index) -> Array:
                keys, values = (
                    buffer[0].at[rows].set(as_bits(as_rows(new)[0], buffer.dtype), mode="drop")
                    for buffer, new in zip(buffers[index], (k, v), strict=True)
                )
                after.append((keys[None], values[None]))
                keys, values = (as_bits(x[:context], q.dtype) for x in (keys, values))
                return attend_upto(q[0], keys, values, rows)[None]

            hidden = layer_of(state)(hidden, at[None], over_rows)
        return hidden, tuple(after)

    return advance


class UnreadableChunks(Exception):
    """The store could not give some chunks of a prefix: they are to be computed again."""

    def __init__(self, which: int, chunks: np.ndarray) -> None:
        super().__init__(f"chunks {chunks.tolist()} of prefix number {which}")
        self.which = which
        self.chunks = chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class _DocumentPacks:
    """Packs of one prefix, of which none is computed again by itself: the tokens are, with all
    documents in sight. See `open_prefix.Source`."""

    which: int
    of: OpenPrefix
    prefix: Prefix
    groups: int
    first_page: np.ndarray
    page_stride: np.ndarray
    sizes: np.ndarray | None

    @property
    def reader(self) -> PackReader:
        """Reads them."""
        return self.of.reader

    @property
    def recovered(self) -> _DocumentPacks:
        """Nothing takes their place."""
        return self

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        raise UnreadableChunks(self.which, chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDocuments:
    """The prefixes of the documents of one request, open."""

    joined: JoinedDocuments
    which: tuple[int, ...]
    """For each document, its prefix among those below: one may come several times."""
    prefixes: Sequence[OpenPrefix]
    probes: Sequence[Digest]

    @property
    def sources(self) -> list[Source]:
        """Where packs of each prefix come from."""
        return [
            _DocumentPacks(
                which=which, of=one, prefix=one.prefix, groups=one.groups, sizes=one.sizes,
                first_page=one.first_page, page_stride=one.page_stride,
            )
            for which, one in enumerate(self.prefixes)
        ]  # fmt: skip

    def chunks_of(self, which: int, chunks: np.ndarray) -> np.ndarray:
        """Chunks of one prefix, by its own numbers, among `chunks` of all: ascending."""
        same = [document for document, mine in enumerate(self.which) if mine == which]
        mine = chunks[np.isin(self.joined.document[chunks], same)]
        return np.unique(self.joined.chunk[mine])

    def everywhere(self, error: UnreadableChunks) -> np.ndarray:
        """The chunks that could not be read, by their numbers in `joined`."""
        joined = self.joined
        same = [document for document, mine in enumerate(self.which) if mine == error.which]
        there = np.isin(joined.document, same) & np.isin(joined.chunk, error.chunks)
        return np.flatnonzero(there)


class DocumentLoader:
    """Reads periods of one engine. Engine thread only; holds no slot of the pool between calls."""

    def __init__(self, runtime: Runtime, *, make_way: Callable[[int], None]) -> None:
        """`make_way(slots)`: running sequences give back what they could do without."""
        self.calls = DocumentCalls(runtime.layers)
        self.runtime = runtime
        self._make_way = make_way

    def load(
        self, opened: OpenDocuments, period: int, rows: JoinedRows, chunks: np.ndarray,
        capacity: int, trace: Trace,
    ) -> list[LayerKv]:  # fmt: skip
        """Buffers of `capacity` rows for each step of a period, `chunks` of them in their `rows`.

        Reads all that there is room for at once, the rest in portions. Raises `UnreadableChunks`.
        """
        memory, plan = self.runtime.memory, self.runtime.plan
        steps, groups = plan.by_period[period].steps, plan.groups(period)
        with trace.span("dispatch", lane="host"):
            buffers = [self.calls.buffers(step.layers, capacity) for step in steps]
        if not len(chunks):
            return buffers
        joined, size = opened.joined, len(rows)
        tables = rotations(self.runtime.layers.config, joined.offsets.tolist())
        document, within = np.zeros((2, capacity), np.int32)
        document[:size], within[:size] = joined.document[rows.chunk], rows.within
        self._make_way(len(chunks) * len(groups))
        room = memory.step_slots
        at_once = len(chunks) * len(groups) <= room
        with self.runtime.open_packs(opened.sources, trace) as packs:
            with trace.span("submit", lane="host", period=period):
                for step in steps if at_once else ():
                    for which, group, own in _wanted(opened, step, chunks):
                        packs.demand(which, group, own)
            for index, step in enumerate(steps):
                portion = len(chunks) if at_once else max(1, room // len(step.groups))
                for first in range(0, len(chunks), portion):
                    now = chunks[first : first + portion]
                    slots = np.full((len(step.groups), capacity), -1, np.int32)
                    slots[:, :size] = self._slots(packs, opened, step, now)[:, rows.chunk]
                    with trace.span("dispatch", lane="host"):
                        buffers[index] = self.calls.bring(
                            buffers[index], memory.pool.pages, slots, within, tables, document
                        )
                        for which, group, _ in _wanted(opened, step, now):
                            packs.give_up(which, group, buffers[index][0][0])
        return buffers

    def _slots(
        self, packs: Packs, opened: OpenDocuments, step: Step, chunks: np.ndarray
    ) -> np.ndarray:
        """The slot int32 [P, M] of each chunk in each of a step's layer groups; -1."""
        joined = opened.joined
        slots = np.full((len(step.groups), joined.num_chunks), -1, np.int32)
        wanted = _wanted(opened, step, chunks)
        for which, group, own in wanted:
            packs.demand(which, group, own)
        for which, group, own in wanted:
            slot_of = np.full(opened.prefixes[which].num_chunks, -1, np.int32)
            slot_of[own] = packs.collect(which, group, own)
            for document in (d for d, mine in enumerate(opened.which) if mine == which):
                mine = chunks[joined.document[chunks] == document]
                slots[group - step.groups.start, mine] = slot_of[joined.chunk[mine]]
        return slots


def _wanted(
    opened: OpenDocuments, step: Step, chunks: np.ndarray
) -> list[tuple[int, int, np.ndarray]]:
    """(prefix, layer group, its own chunks) of all packs of some chunks in a step."""
    own = [opened.chunks_of(which, chunks) for which in range(len(opened.prefixes))]
    return [
        (which, group, mine) for group in step.groups for which, mine in enumerate(own) if len(mine)
    ]
