"""Batches of running sequences, over any prefixes, decoded one token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Several
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
from jax import Array

from ckv_jax.buckets import batch_bucket
from ckv_jax.decode.decoder import Decoder, KvRows, Row, Streaming
from ckv_jax.decode.selection import DecodeSelection, DecodeSelections
from ckv_jax.decode.token import DecodeContext, Scoring, Token
from ckv_jax.decode.window import Window
from ckv_jax.errors import CkvError
from ckv_jax.model.sampling import SamplingArrays, SamplingParams, sample, stack_params, without
from ckv_jax.pipeline.executor import FirstToken, Runtime
from ckv_jax.pipeline.layers import LayerKv
from ckv_jax.pipeline.recovery import RecoveryNeeded
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.offload import Offload
from ckv_jax.serving.sequence import RunningSequence, Sequence, Wake
from ckv_jax.trace import TokenTrace, Trace

_IDLE = SamplingParams()
_SHARED_ROWS = 1024
"""Longer buffers get batches of their own: every row of a batch is as long as the longest."""


class DecodeBatches:
    """All running sequences of one engine. Engine thread only, except `close`.

    Args:
        recovery: the job that computes again what the store lost.
        max_batch: sequences in a batch at most.
        segment_tokens: of a segment of what a sequence generates, where tokens select
            (0: none).
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        recovery: Callable[[RecoveryNeeded], Job],
        max_batch: int,
        segment_tokens: int,
    ) -> None:
        self._runtime = runtime
        self._recovery = recovery
        self._hold_slots = runtime.memory.hold_slots
        self._window = runtime.system.window
        self._max_batch = max_batch
        self.batches: list[_Batch] = []
        """Those that run, each of at least one sequence."""
        self._rows = KvRows(runtime.layers)
        self.selections: DecodeSelections | None = None
        """Selections of each token, if the system has them."""
        self.offload: Offload | None = None
        """Moves generated tokens to the store, if tokens select."""
        if runtime.system.decode is not None:
            scoring = Scoring(runtime.layers)
            token = Token(runtime.layers, scoring, runtime.plan, runtime.background)
            context = DecodeContext(scoring, runtime, token)
            self.selections = (runtime.system.own.decoding or DecodeSelections)(context)
            if segment_tokens:
                self.offload = Offload(runtime, self.selections, tokens=segment_tokens)

    def __len__(self) -> int:
        return sum(len(batch.sequences) for batch in self.batches)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that run."""
        return [running.sequence for running in self._all()]

    @property
    def holding(self) -> list[Sequence]:
        """Those whose packs stay in their device slots between tokens."""
        return [running.sequence for running in self._all() if not running.streams]

    @property
    def excess(self) -> int:
        """Device slots of windows beside those of the latest selections."""
        return sum(running.window.excess for running in self._all() if running.window is not None)

    def narrow(self) -> None:
        """Takes those slots back, until a sequence joins or leaves."""
        self._resize(1.0)

    def rest(self) -> None:
        """Ends what is read between tokens: another batch needs the room."""
        for batch in self.batches:
            batch.rest()

    def start(
        self,
        logits: np.ndarray,
        kv: Several[LayerKv],
        starting: Several[tuple[int, RunningSequence]],
    ) -> None:
        """Samples first tokens, and goes on with all sequences that are not over.

        `logits` float32 [B, V] and `kv`, a batch's (K, V) [B, S, K, D] step by step; each of
        `starting` has its row in them. A raise closes them all; those that cannot join a batch end
        alone.
        """
        params = [_IDLE] * len(logits)
        for row, running in starting:
            assert running.sequence.sampling is not None
            params[row] = running.sequence.sampling
        with ExitStack() as undo:
            for _, running in starting:
                undo.callback(running.close)
            allowed, none = _allowed(logits, dict(starting)), np.zeros(len(logits), np.int32)
            chosen = np.asarray(sample(allowed, stack_params(params), none))
            left, wakes = [], set()
            for row, running in starting:
                running.sequence.check()
                if running.sequence.reason is None:
                    wakes.add(running.sequence.push_sampled(int(chosen[row]), logits, row))
                if running.over:
                    running.retire(None)
                else:
                    left.append((row, running))
            _wake(wakes)
            assigned = self._assigned(left)
            undo.pop_all()
        for batch, members in assigned.items():
            try:
                if batch.ahead is not None:  # rows are about to change
                    try:
                        self._read(batch, batch.ahead, further=False)
                    except Exception as error:  # of those that ran, not of those that join
                        self._end(batch, error)
                        batch.move_ahead(batch.decoder.leave(range(len(batch.decoder.rows))))
                places = batch.decoder.join(kv, [(row, running.row) for row, running in members])
            except Exception as error:  # of those that join, not of those that run
                _close([running for _, running in members], error)
            else:
                for place, (_, running) in zip(places, members, strict=True):
                    batch.sequences[place] = running
            batch.sampling = None
        self._widen()

    def step(self) -> list[Job]:
        """One token for every sequence. Returns jobs that some of them have to wait for."""
        jobs = []
        before = len(self)
        for batch in list(self.batches):
            try:
                if batch.waits:
                    self._drop_lapsed(batch)
                else:
                    job, batch.waits_for = batch.waits_for, None
                    if job is not None and (error := job.future.exception()) is not None:
                        self._give_up(batch, error)  # else the same would be tried for ever
                    self._step(batch)
            except RecoveryNeeded as needed:
                batch.lost = needed.recovered.prefix.id
                rows, lost = list(batch.sequences.values()), needed.recovered.prefix
                own = [one for one in rows if one.opened and one.opened.prefix == lost]
                for running in own or rows:  # none's own: what one is about to move onto
                    if needed.recovered not in running.sequence.recovered:
                        running.sequence.recovered.append(needed.recovered)
                batch.waits_for = self._recovery(needed)
                jobs.append(batch.waits_for)
            except Exception as error:  # the thread has no caller: callers that wait get it
                self._end(batch, error)
            if not batch.sequences:
                self.batches.remove(batch)
        if len(self) != before:
            self._widen()
        return jobs

    def end(self, error: CkvError) -> None:
        """Fails all sequences."""
        for batch in self.batches:
            self._end(batch, error)
        self.batches.clear()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Tokens meanwhile have compiled what those after them take that find all their packs."""
        token = None if self.selections is None else self.selections.context.token
        if token is None:
            yield
            return
        token.warming = True
        try:
            yield
        finally:
            token.warming = False

    def warm(self, sequences: Several[Sequence], tokens: int, suffix: int) -> None:
        """Makes room for so many tokens per row in the batches of these sequences, and compiles
        what it takes for others to join, in batches of up to as many of up to `suffix` tokens."""
        wanted = {id(sequence) for sequence in sequences}
        for batch in self.batches:
            if any(id(running.sequence) in wanted for running in batch.sequences.values()):
                batch.decoder.reserve(tokens)
                joining = 1
                while joining <= len(batch.decoder.rows):
                    batch.decoder.warm_join(joining, suffix, batch_bucket(self._max_batch))
                    joining *= 2

    def waiting(self) -> bool:
        """Whether no sequence can go on before some job is done."""
        return all([batch.waits for batch in self.batches])

    def _assigned(
        self, left: Several[tuple[int, RunningSequence]]
    ) -> dict[_Batch, list[tuple[int, RunningSequence]]]:
        """Sequences by the batches that they join, new ones where none has room."""
        groups: dict[_Batch, list[tuple[int, RunningSequence]]] = {}
        for row, running in left:
            long = running.row.length >= _SHARED_ROWS
            for batch in () if running.streams else self.batches:
                taken = len(batch.sequences) + len(groups.get(batch, ()))
                if not batch.alone and batch.long == long and taken < self._max_batch:
                    break
            else:
                batch = self._batch(running)
                self.batches.append(batch)
            groups.setdefault(batch, []).append((row, running))
        return groups

    def _step(self, batch: _Batch) -> None:
        now = time.monotonic()
        for running in batch.sequences.values():
            running.sequence.check()
            if running.opened is not None and running.opened.hold_at <= now:
                running.opened.hold()
        self._drop(batch, {})
        if not batch.sequences:
            return
        for place, running in batch.sequences.items():
            if running.sequence.shared:
                running.sequence.share_prompt(running.kv(batch.decoder, place))
        if batch.ahead is not None:
            self._read(batch, batch.ahead)
            return
        self._offload_due(batch)
        decoder = batch.decoder
        tokens = np.zeros(len(decoder.rows), np.int32)
        for place, running in batch.sequences.items():
            tokens[place] = running.sequence.token_ids[-1]
        batch.began_ns = time.perf_counter_ns()
        sampling = batch.params(), batch.counts()
        made = decoder.step(tokens, selection=batch.selecting(), sampling=sampling)
        self._read(batch, *made)

    def _read(
        self,
        batch: _Batch,
        logits: np.ndarray | Array,
        sampled: np.ndarray | Array | None = None,
        *,
        further: bool = True,
    ) -> None:
        """Samples from `logits` [B, V], unless that has been `sampled` int32 [B] already, and gives
        every sequence its token.

        With `further`, the calls of the next token are dispatched before this one is read, where
        they need nothing else of it.
        """
        batch.ahead = None
        began = batch.began_ns
        left, kept = {}, {}
        traces: dict[int, TokenTrace] = {}
        for place, running in batch.sequences.items():
            if running.selector is not None:  # before the following token has one
                traces[place] = running.selector.trace
            if running.sequence.reason is None:
                left[place] = running
            else:  # only its last token's KV was missing; it leaves with its row of the logits
                kept[place] = running.kv(batch.decoder, place)
        if left:
            allowed = _allowed(logits, left)
            if sampled is None or allowed is not logits:
                sampled = sample(allowed, batch.params(), batch.counts())
            if further and (following := self._following(batch, left, sampled)) is not None:
                batch.began_ns = time.perf_counter_ns()
                batch.ahead, _ = batch.decoder.step(following, selection=batch.selecting())
            chosen = np.asarray(sampled)
            spent_ms = (time.perf_counter_ns() - began) / 1e6
            wakes = set()
            for place, running in left.items():
                if place in traces:
                    traces[place].ms = spent_ms
                    assert running.sequence.trace is not None
                    running.sequence.trace.tokens.append(traces[place])
                wakes.add(running.sequence.push_sampled(int(chosen[place]), logits, place))
            _wake(wakes)
        self._drop(batch, kept)

    def _following(
        self, batch: _Batch, left: Mapping[int, RunningSequence], sampled: np.ndarray | Array
    ) -> np.ndarray | Array | None:
        """The ids [B] that the next token's calls take, which were just `sampled` for `left`; None:
        those calls need more than the ids, or some row does not go on."""
        if batch.alone or len(left) < len(batch.sequences):
            return None
        if (selection := batch.selecting()) is not None and selection.selects_next:
            return None
        if self._runtime.layers.shardings.mesh is not None:
            return None
        if self.offload is not None and any(map(self.offload.due, left.values())):
            return None
        if not all([running.sequence.goes_on for running in left.values()]):
            return None
        ids = np.full(len(batch.decoder.rows), -1, np.int32)
        ids[list(left)] = [running.sequence.forced(-1) for running in left.values()]
        if (ids < 0).all():
            return sampled
        return np.maximum(ids, 0) if (ids[list(left)] >= 0).all() else None

    def _offload_due(self, batch: _Batch) -> None:
        """Moves generated tokens from buffers to the store, where that is due."""
        if self.offload is None:
            return
        for place, running in batch.sequences.items():
            if self.offload.due(running):
                batch.rest()
                if self.offload.step(running, batch.decoder, place, self._spare):
                    self._widen()

    @property
    def _spare(self) -> int:
        """Device slots that no sequence needs for one selection of each period."""
        least, fixed = self._needs()
        return self._hold_slots - least - fixed

    def _needs(self) -> tuple[int, int]:
        """Device slots of one selection of all that select, and of what others hold."""
        least = fixed = 0
        for running in self._all():
            if running.window is None or not running.window.held:
                continue
            if running.selector is not None:
                least += running.selector.slots
            else:
                fixed += running.window.slots_held
        return least, fixed

    def _all(self) -> list[RunningSequence]:
        return [running for batch in self.batches for running in batch.sequences.values()]

    def _widen(self) -> None:
        """Gives windows what there is room for: each as many times its selection as every other."""
        least, fixed = self._needs()
        share = (self._hold_slots - fixed) / least if least else 1.0
        self._resize(max(1.0, min(self._window, share)))

    def _resize(self, times: float) -> None:
        for batch in self.batches:
            batch.release()
            for running in batch.sequences.values():
                if (selector := running.selector) is not None:
                    selector.window.resize(selector.widths(times))

    def _drop(self, batch: _Batch, kept: Mapping[int, np.ndarray | None]) -> None:
        """Sequences that have ended leave, those at the places of `kept` with their KV."""
        running = batch.sequences
        over = {place: one for place, one in running.items() if place in kept or one.over}
        if not over:
            return
        batch.leave(over)
        with ExitStack() as stack:  # an error on the way keeps none of them waiting
            for place, one in reversed(over.items()):  # callers that get an outcome find them gone
                stack.callback(one.retire, kept.get(place))

    def _drop_lapsed(self, batch: _Batch) -> None:
        """Of a batch that waits, those that are cancelled or late leave, without their KV."""
        running = batch.sequences
        lapsed = [place for place, one in running.items() if one.sequence.lapsed() is not None]
        for place in lapsed:
            running[place].sequence.check()
        self._drop(batch, dict.fromkeys(lapsed))

    def _give_up(self, batch: _Batch, error: BaseException) -> None:
        """Ends those over the prefix that cannot be computed again; all, if none of them is."""
        over, running = {}, batch.sequences
        for place, one in running.items():
            if one.opened is not None and one.opened.prefix.id == batch.lost:
                over[place] = one
        over = over or running
        batch.leave(over)
        _close(list(over.values()), error)

    def _end(self, batch: _Batch, error: Exception) -> None:
        """Ends all sequences of a batch, which hold nothing from then on."""
        left, batch.sequences = list(batch.sequences.values()), {}
        with ExitStack() as stack:
            stack.callback(_close, left, error)
            batch.rest()

    def running_sequence(
        self,
        sequence: Sequence,
        opened: OpenPrefix,
        probes: Digest,
        first: FirstToken,
        row: int,
        *,
        hold: bool,
    ) -> RunningSequence:
        """A sequence that goes on after row `row` of `first`, with its packs pinned if they may
        stay (`hold`) and all are there."""
        selected = [ids[row][ids[row] >= 0] for ids in first.selections]
        window = Window(opened, self._runtime.memory, self._runtime.plan, held=False)
        window.held = hold and all(
            window.cached(selection, ids) for selection, ids in enumerate(selected)
        )
        for selection, ids in enumerate(selected):
            window.select(selection, ids)
        limit = max(map(len, selected))  # as attention decided, or the whole budget
        selector = None
        if self.selections is not None and limit < opened.num_chunks:
            selector = self.selections.row(limit, probes, window)
            selector.apart = sequence.apart
        offloaded = None
        if self.offload is not None:
            offloaded = self.offload.begin(sequence, window, limit)
        return RunningSequence(
            sequence=sequence,
            row=Row(start=opened.prefix.num_tokens, length=len(sequence.suffix), window=window),
            opened=opened.share(),
            window=window,
            selector=selector,
            offloaded=offloaded,
        )

    def _batch(self, first: RunningSequence) -> _Batch:
        """An empty batch for `first` and others like it; one for it alone if its packs stream."""
        runtime, streaming = self._runtime, None
        if first.streams:
            opened = first.opened
            assert opened is not None
            streaming = Streaming(
                runtime.layers, runtime.memory, runtime.plan,
                lambda: runtime.open_packs([opened], Trace()),
            )  # fmt: skip
        return _Batch(
            Decoder(runtime.layers, runtime.memory, runtime.plan, self._rows, streaming=streaming),
            None if self.selections is None else self.selections.batch(),
            alone=first.streams,
            long=first.row.length >= _SHARED_ROWS,
        )

    def close(self) -> None:
        """Ends what is being written. All sequences have ended."""
        if self.offload is not None:
            self.offload.close()


@dataclass(eq=False)
class _Batch:
    """A decode batch and the sequences of its rows."""

    decoder: Decoder
    selection: DecodeSelection | None
    alone: bool
    """Whether it is of one sequence, whose packs stream."""
    long: bool
    """Whether its buffers are long, see `_SHARED_ROWS`."""
    sequences: dict[int, RunningSequence] = field(default_factory=dict)
    sampling: SamplingArrays | None = None
    waits_for: Job | None = None
    """The recovery that it waits for, or has waited for."""
    lost: str = ""
    """The prefix that it computes again."""
    ahead: np.ndarray | Array | None = None
    """Logits [B, V] behind every sequence's latest token, which were dispatched before that was
    read; None: they are still to be computed."""
    began_ns: int = 0
    """When the latest token's calls began to be dispatched."""
    _stale: bool = True
    """Whether the batch has changed since `selection` was given its rows."""

    @property
    def waits(self) -> bool:
        """Whether it cannot go on before a job is done."""
        return self.waits_for is not None and not self.waits_for.future.done()

    def leave(self, over: Mapping[int, RunningSequence]) -> None:
        """The rows at these places leave; their sequences hold what they held."""
        self.release()
        moved, running = self.decoder.leave(list(over)), self.sequences
        self.move_ahead(moved)
        self.sequences = {moved[place]: one for place, one in running.items() if place not in over}
        self.sampling = None

    def move_ahead(self, moved: Mapping[int, int]) -> None:
        """Rows of `ahead` go where those of the decoder went: new places by old ones."""
        if not moved:
            self.ahead = None
        elif self.ahead is not None and len(self.ahead) != len(self.decoder.rows):
            before = np.asarray(self.ahead)
            self.ahead = np.zeros((len(self.decoder.rows), before.shape[1]), before.dtype)
            self.ahead[list(moved.values())] = before[list(moved)]

    def selecting(self) -> DecodeSelection | None:
        """Selections of the rows, if any row selects."""
        if self.selection is None:
            return None
        if self._stale:
            self.selection.rows_are(
                {
                    place: running.selector
                    for place, running in self.sequences.items()
                    if running.selector is not None
                }
            )
            self._stale = False
        return self.selection if self.selection.rows else None

    def release(self) -> None:
        """Rows, or the windows of some of them, are about to change."""
        self._stale = True
        if self.selection is not None:
            self.selection.release()

    def rest(self) -> None:
        """Ends reads of packs: before any prefix is closed."""
        if self.selection is not None:
            self.selection.rest()

    def params(self) -> SamplingArrays:
        """Every row's sampling parameters."""
        if self.sampling is None:
            rows = [_IDLE] * len(self.decoder.rows)
            for place, running in self.sequences.items():
                assert running.sequence.sampling is not None
                rows[place] = running.sequence.sampling
            self.sampling = stack_params(rows)
        return self.sampling

    def counts(self) -> np.ndarray:
        """Tokens int32 [B] that each row has so far."""
        counts = np.zeros(len(self.decoder.rows), np.int32)
        for place, running in self.sequences.items():
            counts[place] = len(running.sequence.token_ids)
        return counts


def _allowed(logits: np.ndarray | Array, rows: Mapping[int, RunningSequence]) -> np.ndarray | Array:
    """`logits` float32 [B, V] without ids that would end a generation of `rows` too early, or that
    its grammar does not let come next."""
    barred, masks = {}, {}
    for row, one in rows.items():
        output = one.sequence.output
        assert output is not None
        if ids := list(output.barred):
            barred[row] = ids
        if (mask := output.allowed(logits.shape[1])) is not None:
            masks[row] = mask
    if barred:
        logits = without(logits, barred)
    if masks:
        logits = np.array(logits)
    for row, mask in masks.items():
        logits[row, ~mask] = -np.inf
    return logits


def _wake(wakes: Collection[Wake | None]) -> None:
    """Listeners take the tokens of a batch, each receiver all of its own at once."""
    for wake in wakes:
        if wake is not None:
            wake()


def _close(sequences: Several[RunningSequence], error: BaseException) -> None:
    """Ends sequences with an error, once none of them holds anything any more."""
    for running in sequences:
        try:
            running.close()
        except Exception as another:  # keeps none of them waiting
            error.add_note(f"then {type(another).__name__} as it was closed: {another}")
    for running in sequences:
        running.sequence.end(error)
