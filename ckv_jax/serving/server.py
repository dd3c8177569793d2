"""Serving: one batch of requests from the queue, through a session, to their outcomes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ckv_jax.model.sampling import sample
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.pipeline.executor import selected_chunks
from ckv_jax.pipeline.kv_rows import rows_bucket
from ckv_jax.request import FirstAnswer, Placed, Result
from ckv_jax.serving.generating import Generating
from ckv_jax.serving.handle import Handle
from ckv_jax.serving.parts import Parts
from ckv_jax.serving.placement import Placement
from ckv_jax.serving.session import DenseSession, Session, SparseSession
from ckv_jax.storage.layout import Layout


class Server:
    """Answers batches. Engine thread only, or under the engine's lock."""

    def __init__(
        self,
        parts: Parts,
        placement: Placement,
        layout: Layout,
        tokenizer: Tokenizer | None,
        end_ids: Sequence[int],
    ) -> None:
        self._parts = parts
        self._placement = placement
        self._layout = layout
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)

    def together(self, handle: Handle) -> tuple[object, ...]:
        """Requests with equal keys may share a batch."""
        placed, sampled = _placed(handle), handle.sampled
        if not self._sparse(placed):
            return (id(handle),)
        return (placed.prefix.id, sampled is not None, sampled and sampled.reselect_every)

    def bytes_needed(self, batch: Sequence[Handle]) -> int:
        """Device bytes that a batch holds at once: packs (at most the whole prefix, read once for
        all) and the keys and values of suffixes and of what will be generated."""
        prefix = _placed(batch[0]).prefix
        layout = self._layout
        token = 2 * layout.num_kv_heads * layout.head_dim * layout.numpy_dtype.itemsize
        tokens = sum(
            rows_bucket(
                len(_placed(handle).suffix)
                + (handle.sampled.params.max_tokens if handle.sampled is not None else 0)
            )
            for handle in batch
        )
        if not self._sparse(_placed(batch[0])):
            return (prefix.num_tokens + tokens) * token * layout.num_layers
        chunks = sum(selected_chunks(_placed(h).budget, prefix.num_chunks) for h in batch)
        held = batch[0].sampled is not None  # else packs make room as the layers go by
        groups = layout.groups if held else len(self._parts.plan.steps[0].groups)
        packs = min(chunks, prefix.num_chunks) * groups * layout.pack_bytes
        return packs + tokens * token * layout.num_layers

    def start(self, batch: Sequence[Handle]) -> Generating | None:
        """First tokens of a batch over one prefix: outcomes, or a generation that goes on.

        Raises what failed the batch as a whole; then no handle of it is done.
        """
        now = time.perf_counter_ns()
        for handle in batch:
            handle.started_ns = now
        placed = [_placed(handle) for handle in batch]
        hold = batch[0].sampled is not None
        with ExitStack() as stack:
            session = stack.enter_context(self._open(placed, hold=hold))
            if hold:
                generating = Generating(session, batch, self._tokenizer, self._end_ids)
                stack.pop_all()
                return generating
            for row, handle in enumerate(batch):
                lapsed = handle.lapsed()
                if lapsed is not None:
                    handle.fail(lapsed)
                else:
                    handle.finish(self._result(handle, session, row))
        return None

    def shorten(self, handle: Handle) -> bool:
        """Looks a request's prefix up again; False if that changes nothing."""
        before = _placed(handle)
        self._parts.forget(before.prefix)
        handle.placed = self._placement.shorten(before)
        return handle.placed.prefix.num_tokens < before.prefix.num_tokens

    def recompute(self, handle: Handle) -> None:
        """Answers one request with nothing from the store."""
        with DenseSession(self._parts, _placed(handle), hold=False) as session:
            handle.finish(self._result(handle, session, 0))

    def executables(self) -> int:
        """How many sampling programs have been compiled so far."""
        call: Any = sample
        return int(call._cache_size())

    def _sparse(self, placed: Placed) -> bool:
        return placed.prefix.num_tokens > 0 and self._parts.system.selector != "none"

    def _open(self, placed: Sequence[Placed], *, hold: bool) -> Session:
        if self._sparse(placed[0]):
            return SparseSession(self._parts, placed, hold=hold)
        if len(placed) > 1:
            raise ValueError(f"got {len(placed)} requests with no stored prefix, expected one")
        return DenseSession(self._parts, placed[0], hold=hold)

    def _result(self, handle: Handle, session: Session, row: int) -> Result:
        token_id = int(session.token_ids[row])
        text = self._tokenizer.decode([token_id]) if self._tokenizer is not None else ""
        return Result(
            request=handle.request,
            trace=session.traces[row],
            queued_ms=handle.queued_ms,
            answer=FirstAnswer(token_id=token_id, text=text, logits=session.logits[row].copy()),
        )


def _placed(handle: Handle) -> Placed:
    assert handle.placed is not None  # whoever submits has placed it
    return handle.placed
