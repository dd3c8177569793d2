"""A batch of generations over one prefix, stepped one token a time until the last has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from jax import Array

from ckv_jax.errors import Cancelled
from ckv_jax.model.sampling import SamplingParams, sample, stack_params
from ckv_jax.model.stream import TextStream
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.pipeline.buckets import batch_bucket
from ckv_jax.request import Placed
from ckv_jax.serving.generation import Completion, FinishReason, Generation, Sampled, TokenEvent
from ckv_jax.serving.handle import Handle
from ckv_jax.serving.session import Session
from ckv_jax.trace import Trace

_IDLE = SamplingParams()


class _Row:
    """One request of the batch."""

    def __init__(
        self, handle: Handle, sampled: Sampled, placed: Placed, trace: Trace,
        tokenizer: Tokenizer | None, end_ids: frozenset[int],
    ) -> None:  # fmt: skip
        self.handle = handle
        self.params = sampled.params
        self.keep_kv = sampled.keep_kv
        self.placed = placed
        self.trace = trace
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.last_ns = self.first_ns = time.perf_counter_ns()
        self._stream = TextStream(tokenizer, stop=self.params.stop) if tokenizer else None
        self._end_ids = end_ids | set(self.params.stop_token_ids)

    def push(self, token: int) -> None:
        """One more token; decides whether it is the last."""
        self.tokens.append(token)
        self.last_ns = time.perf_counter_ns()
        text = ""
        if token in self._end_ids:
            self.reason = "stop"
        elif self._stream is not None:
            text = self._stream.push(token)
            if self._stream.stopped_by is not None:
                self.reason = "stop"
        if self.reason is None and len(self.tokens) == self.params.max_tokens:
            self.reason = "length"
        self._emit(token, text)

    def check(self) -> None:
        """Ends the row if nobody waits for it any more."""
        lapsed = self.handle.lapsed()
        if lapsed is not None and self.reason is None:
            self.reason = "cancelled" if isinstance(lapsed, Cancelled) else "deadline"
            if not self.tokens:
                self.handle.fail(lapsed)

    def finish(self, kv: np.ndarray | None) -> None:
        """Hands the outcome over."""
        if self.handle.done():
            return
        assert self.reason is not None
        if self._stream is not None and (rest := self._stream.finish()):
            self._emit(None, rest)
        self.handle.finish(
            Generation(
                request=self.handle.request,
                trace=self.trace,
                queued_ms=self.handle.queued_ms,
                decode_ms=(self.last_ns - self.first_ns) / 1e6,
                answer=Completion(
                    token_ids=np.array(self.tokens, np.int32),
                    text=self._stream.text if self._stream is not None else "",
                    finish_reason=self.reason,
                    placed=self.placed,
                    kv=kv,
                ),
            )
        )

    def _emit(self, token: int | None, text: str) -> None:
        self.handle.emit(
            TokenEvent(
                index=self.handle.index, request=self.handle.request, token_id=token, text=text
            )
        )


class Generating:
    """A running batch. `step` until it says that all is over, then `close`. Engine thread only."""

    def __init__(
        self,
        session: Session,
        handles: Sequence[Handle],
        tokenizer: Tokenizer | None,
        end_ids: frozenset[int],
    ) -> None:
        self._session = session
        self._decoder = session.decoder()
        self._steps = 0
        first = handles[0].sampled
        assert first is not None
        self._reselect_every = first.reselect_every
        self._rows: list[_Row | None] = [None] * self._decoder.batch
        for row, (handle, trace) in enumerate(zip(handles, session.traces, strict=True)):
            assert handle.sampled is not None and handle.placed is not None
            self._rows[row] = _Row(handle, handle.sampled, handle.placed, trace, tokenizer, end_ids)
        self._stack_params()
        logits = np.zeros((len(self._rows), session.logits.shape[1]), np.float32)
        logits[: len(handles)] = session.logits
        self._drop_lapsed()
        self._accept(logits)

    def step(self) -> bool:
        """One more token for every row; False once there is nothing left to do."""
        self._drop_lapsed()
        if not any(self._rows):
            return False
        self._compact()
        live = np.array([row is not None for row in self._rows])
        tokens = np.array([row.tokens[-1] if row else 0 for row in self._rows], np.int32)
        self._steps += 1
        reselect = self._reselect_every > 0 and self._steps % self._reselect_every == 0
        logits = self._decoder.step(tokens, live, reselect=reselect)
        for index, row in enumerate(self._rows):
            if row is not None and row.reason is not None:  # only its last token was missing
                row.finish(self._decoder.kv(index, row.placed.prefix.num_tokens))
                self._rows[index] = None
        self._accept(logits)
        return any(self._rows)

    def close(self) -> None:
        """Gives the packs and the reader back. Idempotent."""
        self._session.__exit__(None, None, None)

    def _accept(self, logits: Array | np.ndarray) -> None:
        """Chooses every row's next token. Rows that end here are done unless their KV is asked
        for: that of the last token is computed by one more step."""
        steps = np.array([len(row.tokens) if row else 0 for row in self._rows], np.int32)
        chosen = np.asarray(sample(logits, self._sampling, steps)).tolist()
        for row, token in zip(self._rows, chosen, strict=True):
            if row is not None:
                row.push(token)
        self._retire()

    def _drop_lapsed(self) -> None:
        for row in self._rows:
            if row is not None:
                row.check()
        self._retire()

    def _retire(self) -> None:
        for index, row in enumerate(self._rows):
            if row is None or row.reason is None:
                continue
            if not row.keep_kv or row.handle.done():
                row.finish(None)
                self._rows[index] = None

    def _compact(self) -> None:
        """Halves the batch, as often as the rows that are left fit."""
        left = [index for index, row in enumerate(self._rows) if row is not None]
        size = batch_bucket(len(left))
        if size < len(self._rows):
            padded = left + left[:1] * (size - len(left))  # rows of no meaning
            self._decoder.keep(np.array(padded, np.int32))
            self._rows = [self._rows[index] for index in left] + [None] * (size - len(left))
            self._stack_params()

    def _stack_params(self) -> None:
        self._sampling = stack_params([row.params if row else _IDLE for row in self._rows])
