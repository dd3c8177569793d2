"""Sequence: one request in the engine, from `submit` to its outcome."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Several
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from jax import Array

from ckv_jax.config import Budget, SystemConfig
from ckv_jax.decode.decoder import Decoder, Row
from ckv_jax.decode.window import RowSelector, Window
from ckv_jax.errors import Cancelled, CkvError, DeadlineExceeded
from ckv_jax.model.sampling import Logprobs, SamplingParams, logprobs
from ckv_jax.model.tokenizer import LAST_TOKENS, TextStream, Tokenizer
from ckv_jax.pipeline.recovery import Recovered
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.request import (
    Completion,
    FinishReason,
    FirstAnswer,
    Generation,
    Request,
    Result,
    TokenEvent,
)
from ckv_jax.storage.layout import PLAIN
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.trace import Trace

_log = logging.getLogger(__name__)

Outcome = Result | Generation
Wake = Callable[[], None]
Listener = Callable[[TokenEvent], Wake | None]
"""Receives events; returns a function that wakes the receiver, once for all events of a batch."""


class Sequence:
    """A submitted request. `result` waits for its outcome, `cancel` ends it. Thread-safe.

    The outcome is a `Generation` with `sampling`, else a `Result`.
    """

    apart = False
    """Whether it selects as if no other sequence had the same prefix."""

    def __init__(
        self,
        request: Request,
        *,
        index: int = 0,
        sampling: SamplingParams | None = None,
        keep_kv: bool = False,
        listener: Listener | None = None,
    ) -> None:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise ValueError(f"got {type(sampling).__name__}, expected SamplingParams")
        self.request = request
        self.index = index
        """Place in the call that submitted it."""
        self.sampling = sampling
        self.keep_kv = keep_kv
        self.offloaded_chunks = 0
        """Chunks of what it generated that stay in device slots, beside its prefix's."""
        self.recovered: list[Recovered] = []
        """KV that it has waited for stays as long as it runs."""
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.reason: FinishReason | None = None
        self.output: OutputText | None = None
        """Of a generation, once its first token is about to be sampled, as is the next."""
        self.trace: Trace | None = None
        self._listener = listener
        self._started_ns: int | None = None
        self._submitted_ns = time.perf_counter_ns()
        self.future: Future[Outcome] = Future()
        """The outcome, for `concurrent.futures.wait` and `asyncio.wrap_future`."""
        self.future.set_running_or_notify_cancel()  # only `cancel` of ours ends it early
        self._cancelled = False
        self._shares: Callable[[Generation], None] | None = None
        self._settled = threading.Event()

    def result(self, timeout: float | None = None) -> Outcome:
        """Waits for the outcome and returns it; a request that failed has an `error`.

        Raises `TimeoutError` after `timeout` seconds. Any other exception is a fault of this
        library or the machine, not of the request.
        """
        return self.future.result(timeout)

    def settled_result(self) -> Outcome:
        """Waits for the outcome, and until the request's packs, pins and readers are released."""
        outcome = self.future.result()
        self._settled.wait()
        return outcome

    def cancel(self) -> None:
        """Cancels the request: it ends as `Cancelled`, a running generation with its tokens so far.

        It takes effect before the next batch or token; a running computation is not interrupted.
        """
        self._cancelled = True

    def share(self, call: Callable[[Generation], None]) -> None:
        """Calls `call` with the KV of the prompt once that is computed, in the engine thread.

        Its argument is a generation without tokens, with the prompt's whole chunks. `call` does not
        run if there are none, or if the generation has ended by then.
        """
        self._shares = call

    def done(self) -> bool:
        """Whether the outcome is available."""
        return self.future.done()

    def on_done(self, call: Callable[[Sequence], None]) -> None:
        """Calls `call(self)` when the outcome is available, in the engine thread or at once."""
        self.future.add_done_callback(lambda future: call(self))

    # From here on: for the engine thread and the submitting one.

    def place(
        self,
        prefix: Prefix,
        suffix: np.ndarray,
        budget: float | str,
        documents: tuple[Prefix, ...] = (),
    ) -> None:
        """Sets the stored prefix, and the tokens int32 [S] to compute after it.

        `documents`: several stored prefixes in this order; `prefix` is empty then.
        """
        self.prefix = prefix
        self.documents = documents
        self.suffix = suffix
        self.budget = budget
        self.parsed_budget = Budget.of(budget)

    def sparse(self, system: SystemConfig) -> bool:
        """Whether a system reads stored KV for this request."""
        return self.prefix.num_tokens > 0 and not system.computes_all

    @property
    def tokens(self) -> np.ndarray:
        """Token ids of prefix (or documents) and suffix, int32 [T + S]."""
        before = self.documents or (self.prefix,)
        return np.concatenate([*(document.tokens for document in before), self.suffix])

    @property
    def last_tokens(self) -> list[int]:
        """The last tokens of the prompt, on which the first word's spacing depends."""
        last, missing = self.suffix[-LAST_TOKENS:], LAST_TOKENS - len(self.suffix)
        if self.documents:
            last = self.tokens[-LAST_TOKENS:]
        elif missing > 0:
            last = np.concatenate([self.prefix.tokens[-missing:], last])
        found: list[int] = last.tolist()
        return found

    @property
    def queued_ms(self) -> float:
        """Milliseconds from submission until the batch began, or until now."""
        until = time.perf_counter_ns() if self._started_ns is None else self._started_ns
        return (until - self._submitted_ns) / 1e6

    def begin(self) -> None:
        """Its batch begins."""
        self._started_ns = time.perf_counter_ns()

    def lapsed(self) -> CkvError | None:
        """Returns `Cancelled` or `DeadlineExceeded` if the request has to end, else None."""
        if self._cancelled:
            return Cancelled("the request was cancelled")
        deadline = self.request.deadline_s
        if deadline is not None:
            waited = (time.perf_counter_ns() - self._submitted_ns) / 1e9
            if waited > deadline:
                return DeadlineExceeded(f"got no answer within {deadline:g} s")
        return None

    def answer(
        self,
        token_id: int,
        tokenizer: Tokenizer | None,
        logits: np.ndarray,
        trace: Trace,
        attention: np.ndarray | None = None,
    ) -> None:
        """Ends with a first token."""
        text = "" if tokenizer is None else tokenizer.decode_next(token_id, after=self.last_tokens)
        codec = self.prefix.layout.codec if self.documents or self.prefix.num_tokens else PLAIN
        first = FirstAnswer(
            token_id=token_id, text=text, logits=logits, codec=codec, attention=attention
        )
        self.finish(
            Result(request=self.request, trace=trace, queued_ms=self.queued_ms, answer=first)
        )

    def begin_generation(
        self, tokenizer: Tokenizer | None, end_ids: Collection[int], trace: Trace
    ) -> None:
        """The first token is about to be sampled; `end_ids`: see `OutputText`."""
        assert self.sampling is not None
        self.output = OutputText(tokenizer, self.sampling, end_ids, after=self.last_tokens)
        self.trace = trace
        self._first_ns = self._last_ns = time.perf_counter_ns()

    def forced(self, token: int) -> int:
        """The next token: `token`, unless `sampling` forces another one."""
        assert self.sampling is not None
        given = self.sampling.forced_ids[len(self.token_ids) :]
        return given[0] if given else token

    def push_sampled(self, token: int, logits: np.ndarray | Array, row: int) -> Wake | None:
        """One more token, sampled from row `row` of `logits` float32 [B, V]; see `push`."""
        assert self.sampling is not None
        token, count = self.forced(token), self.sampling.logprobs
        found = None if count is None else logprobs(np.asarray(logits)[row], token, count)
        return self.push(token, found)

    @property
    def goes_on(self) -> bool:
        """Whether the model goes on behind the token that is being sampled, unless that ends the
        text."""
        assert self.sampling is not None
        return len(self.token_ids) + 1 < self.sampling.max_tokens or self.keep_kv

    def push(self, token: int, logprobs: Logprobs | None = None) -> Wake | None:
        """One more token, with the log probabilities that `sampling` asks for; returns what has the
        listener take it."""
        assert self.output is not None
        assert self.sampling is not None
        self.token_ids.append(token)
        self._last_ns = time.perf_counter_ns()
        text, ended = self.output.push(token)
        if ended:
            self.reason = "length" if self.output.cut else "stop"
        elif len(self.token_ids) == self.sampling.max_tokens:
            self.reason = "length"
        if logprobs is not None:
            self.logprobs.append(logprobs)
        return self._emit(token, text, None if self.output.ends(token) else logprobs)

    def check(self) -> None:
        """Ends a generation that is cancelled or late."""
        lapsed = self.lapsed()
        if lapsed is not None and self.reason is None:
            self.reason = "cancelled" if isinstance(lapsed, Cancelled) else "deadline"
            if not self.token_ids:
                self.fail(lapsed)

    def fail_if_lapsed(self) -> bool:
        """Whether it is cancelled or late; then it has failed."""
        error = self.lapsed()
        if error is not None:
            self.fail(error)
        return error is not None

    @property
    def shared(self) -> bool:
        """Whether `share` was called, and `share_prompt` was not since."""
        return self._shares is not None

    def share_prompt(self, kv: np.ndarray) -> None:
        """Gives the prompt to the call of `share`; `kv` [L, 2, n, K, D] of all after the prefix."""
        call, self._shares = self._shares, None
        size, before = self.prefix.layout.chunk_tokens, self.prefix.num_tokens
        count = (before + len(self.suffix)) // size * size - before
        if call is None or count <= 0:
            return
        answer = Completion(
            token_ids=np.zeros(0, np.int32),
            text="",
            finish_reason="length",
            prefix=self.prefix,
            suffix=self.suffix[:count],
            budget=self.budget,
            kv=np.ascontiguousarray(kv[:, :, :count]),
        )
        call(Generation(request=self.request, trace=Trace(), answer=answer))

    def finish_generation(self, kv: np.ndarray | None) -> None:
        """Ends with a generation."""
        if self.done():
            return
        assert self.reason is not None
        assert self.output is not None
        assert self.trace is not None
        if rest := self.output.finish():
            self._emit(None, rest)
        self.finish(
            Generation(
                request=self.request,
                trace=self.trace,
                queued_ms=self.queued_ms,
                decode_ms=(self._last_ns - self._first_ns) / 1e6,
                answer=Completion(
                    token_ids=np.array(self.token_ids, np.int32),
                    text=self.output.text,
                    finish_reason=self.reason,
                    prefix=self.prefix,
                    documents=self.documents,
                    suffix=self.suffix,
                    budget=self.budget,
                    kv=kv,
                    logprobs=tuple(self.logprobs),
                    stopped_by=self.output.stopped_by,
                ),
            )
        )

    def finish(self, outcome: Outcome) -> None:
        """The outcome is there, unless another one was before."""
        with suppress(InvalidStateError):
            self.future.set_result(outcome)

    def fail(self, error: CkvError | ValueError) -> None:
        """The request's own fault: an outcome with an `error`, unless there is one already."""
        if not self.done():
            trace = Trace()
            trace.end()
            kind = Result if self.sampling is None else Generation
            self.finish(
                kind(request=self.request, trace=trace, queued_ms=self.queued_ms, error=error)
            )
        self.settle()

    def crash(self, error: BaseException) -> None:
        """A fault that is not the request's: raised in the threads that wait."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)
        self.settle()

    def end(self, error: BaseException) -> None:
        """Ends with an error: the request's own outcome, or raised in the threads that wait."""
        if isinstance(error, (CkvError, ValueError)):
            self.fail(error)
        else:
            self.crash(error)

    def settle(self) -> None:
        """The request holds no packs, pins or readers any more."""
        self.recovered.clear()
        self._settled.set()

    def _emit(self, token: int | None, text: str, logprobs: Logprobs | None = None) -> Wake | None:
        if self._listener is None:
            return None
        return self._listener(
            TokenEvent(
                index=self.index,
                request=self.request,
                token_id=token,
                text=text,
                logprobs=logprobs,
            )
        )


def result_of(sequence: Sequence, *, settled: bool = False) -> Result:
    """The outcome of a sequence that is not sampled; waits for it."""
    outcome = sequence.settled_result() if settled else sequence.result()
    assert isinstance(outcome, Result)
    return outcome


def generation_of(sequence: Sequence, *, settled: bool = False) -> Generation:
    """The outcome of a sampled sequence; waits for it."""
    outcome = sequence.settled_result() if settled else sequence.result()
    assert isinstance(outcome, Generation)
    return outcome


class OutputText:
    """The text of one generation as it comes; empty without a tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        end_ids: Collection[int],
        *,
        after: Several[int] = (),
    ) -> None:
        """`end_ids`: those that end a sequence of the model; `after`: the last tokens of the
        prompt."""
        self._stream = TextStream(tokenizer, stop=params.stop, after=after) if tokenizer else None
        self._end_ids = set(params.stop_token_ids)
        self._hidden_ids = set(end_ids)
        if not params.ignore_eos:
            self._end_ids |= self._hidden_ids
        self._matcher = None if params.grammar is None else params.grammar.matcher()
        self._min_tokens = params.min_tokens
        self._tokens = 0

    @property
    def text(self) -> str:
        """Everything so far, without stop tokens and stop strings."""
        return self._stream.text if self._stream is not None else ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one has."""
        return self._stream.stopped_by if self._stream is not None else None

    def ends(self, token: int) -> bool:
        """Whether a token ends the generation and is not in its text."""
        return token in self._end_ids

    @property
    def barred(self) -> Collection[int]:
        """Ids that may not come next: `min_tokens` are not there yet."""
        return self._end_ids if self._tokens < self._min_tokens else ()

    def allowed(self, size: int) -> np.ndarray | None:
        """Returns a mask of the ids that a grammar allows next, bool [V]; None without one."""
        if self._matcher is None:
            return None
        return self._matcher.allowed(size, list(self._end_ids))

    @property
    def cut(self) -> bool:
        """Whether it ends before it is what its grammar says, which is too complex to follow."""
        return self._matcher is not None and self._matcher.failed

    def push(self, token: int) -> tuple[str, bool]:
        """(text that is certain now and was not before, whether the generation ends here)."""
        self._tokens += 1
        if self.ends(token) or self.cut:
            return "", True
        complete = self._matcher is not None and self._matcher.push(token)
        if self._stream is None or token in self._hidden_ids:
            return "", complete
        new = self._stream.push(token, stops=self._tokens > self._min_tokens)
        return new, complete or self._stream.stopped_by is not None

    def finish(self) -> str:
        """Returns the rest of the text, once no token follows."""
        return self._stream.finish() if self._stream is not None else ""


Written = tuple[Prefix, PrefixReader]
"""A stored prefix, and the reader that keeps others from removing it."""


@dataclass(slots=True, kw_only=True)
class OffloadedTokens:
    """Segments of what one sequence generated, which it alone attends to."""

    prefix: Prefix
    """The request's prefix and the segments so far."""
    provenance: str
    """Of the segments; no other sequence has it."""
    at: int
    """Tokens in the buffers at which the next segment is written, or read where it is written."""
    exact: bool
    """Whether the sequence attends to everything."""
    limit: int
    """Chunks of a selection, as of the first one."""
    room: int
    """Chunks of the prefix in the end, so that one program serves all selections."""
    end: Callable[[OffloadedTokens], None]
    """Removes its segments."""
    writing: tuple[int, Future[Written]] | None = None
    """Tokens of the segment that is being written, and the prefix that ends with it."""
    kv: list[np.ndarray] = field(default_factory=list)
    """Of the segments, [L, 2, n, K, D] each, with `keep_kv`."""


@dataclass(slots=True, kw_only=True)
class RunningSequence:
    """One running sequence, and what it holds."""

    sequence: Sequence
    row: Row
    opened: OpenPrefix | None = None
    """The stored prefix that it attends to; None: there is none."""
    window: Window | None = None
    selector: RowSelector | None = None
    """None: its selection stays."""
    offloaded: OffloadedTokens | None = None
    """None: what it generates stays in its buffers."""

    @property
    def streams(self) -> bool:
        """Whether its packs come through the pool again for every token."""
        return self.window is not None and not self.window.held

    @property
    def over(self) -> bool:
        """Whether it has nothing left to compute."""
        sequence = self.sequence
        return sequence.reason is not None and (not sequence.keep_kv or sequence.done())

    def kv(self, decoder: Decoder, place: int) -> np.ndarray:
        """Keys and values [L, 2, n, K, D] of all after the request's prefix."""
        first = max(self.sequence.prefix.num_tokens, self.row.start)
        stored = self.offloaded.kv if self.offloaded is not None else []
        return np.concatenate([*stored, decoder.kv(place, first)], axis=2)

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        if self.window is not None:
            self.window.close()
        if self.opened is not None:
            self.opened.close()
            self.opened = None
        if self.offloaded is not None:
            self.offloaded.end(self.offloaded)
            self.offloaded = None

    def retire(self, kv: np.ndarray | None) -> None:
        """Hands the outcome over once nothing is held any more."""
        try:
            self.close()
        except Exception:  # its tokens are there; others of its batch go on
            _log.exception("a generation that ended did not give back what it held")
        try:
            self.sequence.finish_generation(kv)
        except Exception as error:  # its own caller gets it; others of its batch go on
            self.sequence.crash(error)
        self.sequence.settle()
