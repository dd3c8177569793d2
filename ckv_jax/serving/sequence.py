"""One request's life: from `submit` through the queue, a batch and a text, to its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import numpy as np

from ckv_jax.errors import Cancelled, CkvError, DeadlineExceeded
from ckv_jax.model.detokenizer import LAST_TOKENS
from ckv_jax.model.sampling import Logprobs, SamplingParams
from ckv_jax.request import (
    Completion,
    FinishReason,
    FirstAnswer,
    Generation,
    Request,
    Result,
    TokenEvent,
)
from ckv_jax.serving.text import Text
from ckv_jax.storage.layout_versions import PLAIN
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import TokenTrace, Trace

Outcome = Result | Generation


class Sequence:
    """A request on its way. `result` waits, `cancel` gives it up; safe in any thread.

    With `sampling` it ends in a `Generation`, without in a `Result`.
    """

    apart = False
    """Whether it chooses as if nobody else stood on its prefix."""

    def __init__(
        self,
        request: Request,
        *,
        index: int = 0,
        sampling: SamplingParams | None = None,
        keep_kv: bool = False,
        listener: Callable[[TokenEvent], None] | None = None,
    ) -> None:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise ValueError(f"got {type(sampling).__name__}, expected SamplingParams")
        self.request = request
        self.index = index
        """Place in the call that submitted it."""
        self.sampling = sampling
        self.keep_kv = keep_kv
        self.grown = 0
        """Chunks of what it generated that stay in device slots, beside its prefix's."""
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.reason: FinishReason | None = None
        self._text: Text | None = None
        self._trace: Trace | None = None
        self._listener = listener
        self._started_ns: int | None = None
        self._submitted_ns = time.perf_counter_ns()
        self._future: Future[Outcome] = Future()
        self._future.set_running_or_notify_cancel()  # only `cancel` of ours ends it early
        self._cancelled = False
        self._shares: Callable[[Generation], None] | None = None
        self._settled = threading.Event()

    def result(self, timeout: float | None = None) -> Outcome:
        """Waits for the outcome; its `error` says what was wrong with the request.

        Raises `TimeoutError` after `timeout` seconds; anything else that is raised is a fault of
        this library or the machine, not of the request.
        """
        return self._future.result(timeout)

    def settled_result(self) -> Outcome:
        """The same once what the request held (packs, pins, readers) has been given back."""
        outcome = self._future.result()
        self._settled.wait()
        return outcome

    def cancel(self) -> None:
        """Gives the request up: it ends as `Cancelled`, a running generation with what it has.

        Takes effect before the next batch or token; a batch that is being computed is not
        interrupted.
        """
        self._cancelled = True

    def share(self, call: Callable[[Generation], None]) -> None:
        """Calls `call`, in the engine thread, with a generation of no tokens: the prompt's whole
        chunks with their KV, once that is computed. Never, if there are none, or the text is over
        by then."""
        self._shares = call

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()

    @property
    def future(self) -> Future[Outcome]:
        """For `concurrent.futures.wait`, callbacks and `asyncio.wrap_future`."""
        return self._future

    def on_done(self, call: Callable[[Sequence], None]) -> None:
        """Calls `call(self)` once the outcome is there, in the engine thread or at once."""
        self._future.add_done_callback(lambda future: call(self))

    # From here on: for the engine thread and the submitting one.

    def place(
        self,
        prefix: Prefix,
        suffix: np.ndarray,
        budget: float | str,
        parts: tuple[Prefix, ...] = (),
    ) -> None:
        """Where it stands: what is stored, and the tokens int32 [S] to compute after that.

        `parts`: several stored texts one after the other, in place of the prefix, which is empty.
        """
        self.prefix = prefix
        self.parts = parts
        self.suffix = suffix
        self.budget = budget

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T + S]: prefix, or parts, and suffix."""
        before = self.parts or (self.prefix,)
        return np.concatenate([*(part.tokens for part in before), self.suffix])

    @property
    def last_tokens(self) -> list[int]:
        """The last tokens of the prompt, on which the first word's spacing depends."""
        last: list[int] = self.tokens[-LAST_TOKENS:].tolist()
        return last

    @property
    def queued_ms(self) -> float:
        """From submission until its batch began, or until now."""
        until = time.perf_counter_ns() if self._started_ns is None else self._started_ns
        return (until - self._submitted_ns) / 1e6

    def begin(self) -> None:
        """Its batch begins."""
        self._started_ns = time.perf_counter_ns()

    def lapsed(self) -> CkvError | None:
        """Why nobody waits for this request any more, if so."""
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
        text: str,
        logits: np.ndarray,
        trace: Trace,
        attention: np.ndarray | None = None,
    ) -> None:
        """Ends with a first token."""
        codec = self.prefix.layout.codec if self.parts or self.prefix.num_tokens else PLAIN
        first = FirstAnswer(
            token_id=token_id, text=text, logits=logits, codec=codec, attention=attention
        )
        self.finish(
            Result(request=self.request, trace=trace, queued_ms=self.queued_ms, answer=first)
        )

    def begin_text(self, text: Text, trace: Trace) -> None:
        """The first token is about to be chosen."""
        self._text, self._trace = text, trace
        self._first_ns = self._last_ns = time.perf_counter_ns()

    def note(self, token: TokenTrace) -> None:
        """Where the next token's packs came from."""
        assert self._trace is not None
        self._trace.tokens.append(token)

    def note_segment(self) -> None:
        """Some of what it generated is stored now, and no longer in its buffers."""
        assert self._trace is not None
        self._trace.segments += 1

    def forced(self, token: int) -> int:
        """The next token: `token`, unless `sampling` forces another one."""
        assert self.sampling is not None
        given = self.sampling.forced_ids[len(self.token_ids) :]
        return given[0] if given else token

    @property
    def barred(self) -> Collection[int]:
        """Ids that may not be the next token."""
        assert self._text is not None
        return self._text.barred

    def allowed(self, size: int) -> np.ndarray | None:
        """Which of `size` ids its grammar lets come next, bool [V]; None: any."""
        assert self._text is not None
        return self._text.allowed(size)

    def push(self, token: int, logprobs: Logprobs | None = None) -> None:
        """One more token, with what `sampling` asks to be told of it; is it the last?"""
        assert self._text is not None
        assert self.sampling is not None
        self.token_ids.append(token)
        self._last_ns = time.perf_counter_ns()
        text, ended = self._text.push(token)
        if ended:
            self.reason = "stop"
        elif len(self.token_ids) == self.sampling.max_tokens:
            self.reason = "length"
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self._emit(token, text, None if self._text.ends(token) else logprobs)

    def check(self) -> None:
        """Ends a text that nobody waits for any more."""
        lapsed = self.lapsed()
        if lapsed is not None and self.reason is None:
            self.reason = "cancelled" if isinstance(lapsed, Cancelled) else "deadline"
            if not self.token_ids:
                self.fail(lapsed)

    @property
    def shared(self) -> bool:
        """Whether `share_prompt` has somebody to give it to."""
        return self._shares is not None

    def share_prompt(self, kv: np.ndarray) -> None:
        """Gives the prompt to who asked for it; `kv` [L, 2, n, K, D] of all after the prefix."""
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

    def finish_text(self, kv: np.ndarray | None) -> None:
        """Ends with a generation."""
        if self.done():
            return
        assert self.reason is not None
        assert self._text is not None
        assert self._trace is not None
        if rest := self._text.finish():
            self._emit(None, rest)
        self.finish(
            Generation(
                request=self.request,
                trace=self._trace,
                queued_ms=self.queued_ms,
                decode_ms=(self._last_ns - self._first_ns) / 1e6,
                answer=Completion(
                    token_ids=np.array(self.token_ids, np.int32),
                    text=self._text.text,
                    finish_reason=self.reason,
                    prefix=self.prefix,
                    parts=self.parts,
                    suffix=self.suffix,
                    budget=self.budget,
                    kv=kv,
                    logprobs=tuple(self.logprobs),
                ),
            )
        )

    def finish(self, outcome: Outcome) -> None:
        """The outcome is there, unless another one was before."""
        with suppress(InvalidStateError):
            self._future.set_result(outcome)

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
            self._future.set_exception(error)
        self.settle()

    def settle(self) -> None:
        """The request holds nothing any more."""
        self._settled.set()

    def _emit(self, token: int | None, text: str, logprobs: Logprobs | None = None) -> None:
        if self._listener is not None:
            self._listener(
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
