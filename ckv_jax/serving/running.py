"""Sequences between two of their tokens: batches of any of them, stepped a token at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from contextlib import ExitStack

import numpy as np
from jax import Array

from ckv_jax.buckets import batch_bucket
from ckv_jax.decode.decoder import Decoder
from ckv_jax.decode.selection import DecodeSelection
from ckv_jax.errors import CkvError
from ckv_jax.model.sampling import (
    SamplingArrays,
    SamplingParams,
    logprobs,
    sample,
    stack_params,
    without,
)
from ckv_jax.pipeline.layers import LayerKv
from ckv_jax.pipeline.recovery import RecoveryNeeded
from ckv_jax.serving.decoding import Decoding
from ckv_jax.serving.going import Going
from ckv_jax.serving.job import Job
from ckv_jax.serving.sequence import Sequence

_IDLE = SamplingParams()
_SHARED_ROWS = 1024
"""Longer buffers get batches of their own: every row of a batch is as long as the longest."""


class Running:
    """All running sequences of one engine. Engine thread only.

    Args:
        decoding: makes what a batch of them is decoded with, and what they become segments by.
        recovery: the job that computes again what the store lost.
        hold_slots: device slots that all windows may have together.
        window: slots of a window for each chunk of a choice, where there are so many.
    """

    def __init__(
        self,
        decoding: Decoding,
        *,
        recovery: Callable[[RecoveryNeeded], Job],
        hold_slots: int,
        window: float,
        max_batch: int,
    ) -> None:
        self._decoding = decoding
        self._recovery = recovery
        self._hold_slots = hold_slots
        self._window = window
        self._max_batch = max_batch
        self._batches: list[_Batch] = []

    def __len__(self) -> int:
        return sum(len(batch.going) for batch in self._batches)

    @property
    def sequences(self) -> list[Sequence]:
        """Everyone who runs."""
        return [going.sequence for batch in self._batches for going in batch.going.values()]

    @property
    def holding(self) -> list[Sequence]:
        """Those whose packs stay in their device slots between tokens."""
        return [
            going.sequence
            for batch in self._batches
            for going in batch.going.values()
            if not going.streams
        ]

    @property
    def excess(self) -> int:
        """Device slots that windows could do without: what they keep beside the latest choices."""
        return sum(going.window.excess for going in self._all() if going.window is not None)

    def narrow(self) -> None:
        """Takes those slots back, until somebody joins or leaves."""
        self._resize(1.0)

    def rest(self) -> None:
        """Ends what is read between tokens: another batch needs the room."""
        for batch in self._batches:
            batch.rest()

    def start(
        self, logits: np.ndarray, kv: Several[LayerKv], starting: Several[tuple[int, Going]]
    ) -> None:
        """Chooses first tokens, and goes on with all that are not over.

        `logits` float32 [B, V] and `kv`, a batch's (K, V) [B, S, K, D] step by step; each of
        `starting` has its row in them.
        """
        params = [_IDLE] * len(logits)
        for row, going in starting:
            assert going.sequence.sampling is not None
            params[row] = going.sequence.sampling
        allowed = _allowed(logits, dict(starting))
        chosen = np.asarray(sample(allowed, stack_params(params), np.zeros(len(logits), np.int32)))
        left = []
        for row, going in starting:
            going.sequence.check()
            if going.sequence.reason is None:
                _push(going.sequence, int(chosen[row]), logits, row)
            if _over(going):
                _retire(going, None)
            else:
                left.append((row, going))
        for batch, members in self._assigned(left):
            places = batch.decoder.join(kv, [(row, going.row) for row, going in members])
            for place, (_, going) in zip(places, members, strict=True):
                batch.going[place] = going
            batch.sampling = None
        self._widen()

    def step(self) -> list[Job]:
        """One token for every sequence. Returns jobs that some of them have to wait for."""
        jobs = []
        before = len(self)
        for batch in list(self._batches):
            if batch.waits_for is not None and not batch.waits_for.future.done():
                for going in batch.going.values():
                    going.sequence.check()
                continue
            try:
                batch.waits_for = None
                self._step(batch)
            except RecoveryNeeded as needed:
                batch.waits_for = self._recovery(needed)
                jobs.append(batch.waits_for)
            except (CkvError, ValueError) as error:
                self._fail(batch, error)
            except Exception as error:  # the thread has no caller: who waits gets it raised
                self._crash(batch, error)
            if not batch.going:
                self._batches.remove(batch)
        if len(self) != before:
            self._widen()
        return jobs

    def end(self, error: CkvError) -> None:
        """Fails everyone."""
        for batch in self._batches:
            self._fail(batch, error)
        self._batches.clear()

    def warm(self, sequences: Several[Sequence], tokens: int, suffix: int) -> None:
        """Makes room for so many tokens per row in the batches of these sequences, and compiles
        what it takes for others to join, in batches of up to as many of up to `suffix` tokens."""
        wanted = {id(sequence) for sequence in sequences}
        for batch in self._batches:
            if any(id(going.sequence) in wanted for going in batch.going.values()):
                batch.decoder.reserve(tokens)
                joining = 1
                while joining <= len(batch.decoder.rows):
                    batch.decoder.warm_join(joining, suffix, batch_bucket(self._max_batch))
                    joining *= 2

    def waiting(self) -> bool:
        """Whether nobody can go on before some job is done."""
        return all(
            batch.waits_for is not None and not batch.waits_for.future.done()
            for batch in self._batches
        )

    def _assigned(
        self, left: Several[tuple[int, Going]]
    ) -> Iterable[tuple[_Batch, list[tuple[int, Going]]]]:
        """Sequences with the batches that they join, new ones where none has room."""
        groups: dict[int, tuple[_Batch, list[tuple[int, Going]]]] = {}
        for row, going in left:
            batch = None
            if not going.streams:
                long = going.row.length >= _SHARED_ROWS
                for other in self._batches:
                    taken = len(other.going) + len(groups.get(id(other), (other, []))[1])
                    if not other.alone and other.long == long and taken < self._max_batch:
                        batch = other
                        break
            if batch is None:
                alone = going.streams
                batch = _Batch(
                    self._decoding.decoder(going.opened if alone else None),
                    self._decoding.selection(),
                    alone=alone,
                    long=going.row.length >= _SHARED_ROWS,
                )
                self._batches.append(batch)
            groups.setdefault(id(batch), (batch, []))[1].append((row, going))
        return groups.values()

    def _step(self, batch: _Batch) -> None:
        for going in batch.going.values():
            going.sequence.check()
        self._drop(batch, {})
        if not batch.going:
            return
        for place, going in batch.going.items():
            if going.sequence.shared:
                going.sequence.share_prompt(going.kv(batch.decoder, place))
        self._put_behind(batch)
        decoder = batch.decoder
        tokens = np.zeros(len(decoder.rows), np.int32)
        for place, going in batch.going.items():
            tokens[place] = going.sequence.token_ids[-1]
        selection, began = batch.selecting(), time.perf_counter_ns()
        logits = decoder.step(tokens, selection=selection)
        left, kept = {}, {}
        for place, going in batch.going.items():
            if going.sequence.reason is None:
                left[place] = going
            else:  # only its last token's KV was missing; it leaves with its row of the logits
                kept[place] = going.kv(decoder, place)
        if left:
            allowed = _allowed(logits, left)
            chosen = np.asarray(sample(allowed, batch.params(), batch.counts()))
            spent_ms = (time.perf_counter_ns() - began) / 1e6
            for place, going in left.items():
                if going.selector is not None:
                    going.selector.trace.ms = spent_ms
                    going.sequence.note(going.selector.trace)
                _push(going.sequence, int(chosen[place]), logits, place)
        self._drop(batch, kept)

    def _put_behind(self, batch: _Batch) -> None:
        """What texts generated leaves their buffers, where that is due."""
        segments = self._decoding.segments
        if segments is None:
            return
        for place, going in batch.going.items():
            if segments.due(going):
                batch.rest()
                if segments.step(going, batch.decoder, place, self._spare):
                    self._widen()

    @property
    def _spare(self) -> int:
        """Device slots that nobody needs for one choice of each period."""
        least, fixed = self._needs()
        return self._hold_slots - least - fixed

    def _needs(self) -> tuple[int, int]:
        """Device slots of one choice of all that choose, and of what others hold."""
        least = fixed = 0
        for going in self._all():
            if going.window is None or not going.window.held:
                continue
            if going.selector is not None:
                least += going.selector.slots
            else:
                fixed += going.window.slots_held
        return least, fixed

    def _all(self) -> list[Going]:
        return [going for batch in self._batches for going in batch.going.values()]

    def _widen(self) -> None:
        """Gives windows what there is room for: each as many times its choice as every other."""
        least, fixed = self._needs()
        share = (self._hold_slots - fixed) / least if least else 1.0
        self._resize(max(1.0, min(self._window, share)))

    def _resize(self, times: float) -> None:
        for batch in self._batches:
            batch.release()
            for going in batch.going.values():
                if going.selector is not None:
                    going.selector.resize(times)

    def _drop(self, batch: _Batch, kept: Mapping[int, np.ndarray]) -> None:
        """Sequences that have ended leave, those at the places of `kept` with their KV."""
        going = batch.going
        over = {place: one for place, one in going.items() if place in kept or _over(one)}
        if not over:
            return
        batch.release()
        moved = batch.decoder.leave(list(over))
        batch.going = {moved[place]: one for place, one in going.items() if place not in over}
        batch.sampling = None
        for place, one in over.items():  # whoever is told finds them gone
            _retire(one, kept.get(place))

    def _fail(self, batch: _Batch, error: CkvError | ValueError) -> None:
        self._empty(batch, lambda sequence: sequence.fail(error))

    def _crash(self, batch: _Batch, error: Exception) -> None:
        self._empty(batch, lambda sequence: sequence.crash(error))

    def _empty(self, batch: _Batch, end: Callable[[Sequence], None]) -> None:
        """Ends all sequences of a batch, which hold nothing from then on."""
        left, batch.going = list(batch.going.values()), {}
        with ExitStack() as stack:  # an error on the way keeps none of them waiting
            for going in left:
                stack.callback(end, going.sequence)
            for going in left:
                stack.callback(going.close)
            batch.rest()


class _Batch:
    """A decode batch and whose its rows are."""

    def __init__(
        self, decoder: Decoder, selection: DecodeSelection | None, *, alone: bool, long: bool
    ) -> None:
        self.decoder = decoder
        self.selection = selection
        self._stale = True
        """Whether `selection` does not know yet who is in the batch."""
        self.alone = alone
        self.long = long
        self.going: dict[int, Going] = {}
        self.sampling: SamplingArrays | None = None
        self.waits_for: Job | None = None

    def selecting(self) -> DecodeSelection | None:
        """What selects for rows, if any of them selects."""
        if self.selection is None:
            return None
        if self._stale:
            self.selection.rows_are(
                {
                    place: going.selector
                    for place, going in self.going.items()
                    if going.selector is not None
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
            for place, going in self.going.items():
                assert going.sequence.sampling is not None
                rows[place] = going.sequence.sampling
            self.sampling = stack_params(rows)
        return self.sampling

    def counts(self) -> np.ndarray:
        """Tokens int32 [B] that each row has so far."""
        counts = np.zeros(len(self.decoder.rows), np.int32)
        for place, going in self.going.items():
            counts[place] = len(going.sequence.token_ids)
        return counts


def _allowed(logits: np.ndarray | Array, rows: Mapping[int, Going]) -> np.ndarray | Array:
    """`logits` float32 [B, V] without ids that would end a text of `rows` too early, or that its
    grammar does not let come next."""
    barred = {row: ids for row, one in rows.items() if (ids := list(one.sequence.barred))}
    if barred:
        logits = without(logits, barred)
    for row, one in rows.items():
        if (allowed := one.sequence.allowed(logits.shape[1])) is not None:
            logits = np.array(logits) if not isinstance(logits, np.ndarray) else logits.copy()
            logits[row, ~allowed] = -np.inf
    return logits


def _push(sequence: Sequence, token: int, logits: np.ndarray | Array, row: int) -> None:
    """One more token for a sequence, chosen by row `row` of `logits` float32 [B, V]."""
    assert sequence.sampling is not None
    token, count = sequence.forced(token), sequence.sampling.logprobs
    found = None if count is None else logprobs(np.asarray(logits)[row], token, count)
    sequence.push(token, found)


def _over(going: Going) -> bool:
    """Whether a sequence has nothing left to compute."""
    sequence = going.sequence
    return sequence.reason is not None and (not sequence.keep_kv or sequence.done())


def _retire(going: Going, kv: np.ndarray | None) -> None:
    """Hands the outcome over once nothing is held any more."""
    going.close()
    going.sequence.finish_text(kv)
    going.sequence.settle()
