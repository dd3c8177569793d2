"""Sessions: one batch over one prefix, from its re-prefill for as long as its KV is needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from ckv_jax.pipeline.decode import Decoder
from ckv_jax.pipeline.executor import Batch, FirstToken
from ckv_jax.pipeline.recovery import Recovery
from ckv_jax.pipeline.reselect import Reselect
from ckv_jax.reads.packs import PackSource
from ckv_jax.reads.probes import Probes
from ckv_jax.request import Placed
from ckv_jax.serving.parts import Parts
from ckv_jax.trace import Trace


class Session(Protocol):
    """A batch whose first tokens are there. A context manager: leaving it gives the KV up."""

    @property
    def logits(self) -> np.ndarray:
        """float32 [rows, V] after each suffix."""
        ...

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [rows]: their argmax."""
        ...

    @property
    def traces(self) -> Sequence[Trace]:
        """One a row."""
        ...

    def decoder(self) -> Decoder:
        """Goes on from the first tokens."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class SparseSession:
    """A batch over the selected chunks of one stored prefix.

    With `hold`, packs stay in their slots until the session is left; without, they make room as
    the layers go by. Raises a `StoreError` if the prefix is gone.
    """

    def __init__(self, parts: Parts, placed: Sequence[Placed], *, hold: bool) -> None:
        self._parts = parts
        self._placed = placed
        self._prefix = parts.current(placed[0].prefix)
        self._exit = ExitStack()
        try:
            self._open(hold)
        except BaseException:
            self._exit.close()
            raise

    def _open(self, hold: bool) -> None:
        parts, prefix = self._parts, self._prefix
        trace = Trace()
        reader = self._exit.enter_context(
            parts.store.reader(prefix, deadline_s=parts.read_deadline_s)
        )
        view = self._exit.enter_context(parts.views.using(prefix))
        order = reader.order if prefix.layout.reordered else None
        recovery = Recovery(prefix, parts.prefill, order)
        units = view.num_chunks if parts.system.chunked else prefix.num_tokens
        self._batch = Batch.of(
            [placed.suffix for placed in self._placed],
            [placed.budget for placed in self._placed],
            units,
        )
        source = PackSource(
            view=view,
            reader=reader,
            memory=parts.memory,
            prefetcher=parts.prefetcher,
            recompute=recovery.packs,
            trace=trace,
            hold=hold,
        )
        self._exit.enter_context(source)
        probes = Probes(
            view=view,
            views=parts.views,
            reader=reader,
            plan=parts.plan,
            system=parts.system,
            threads=parts.probe_threads,
            buffers=parts.key_buffers,
            recovery=recovery,
            trace=trace,
        )
        self._exit.callback(probes.cancel)
        self._first = parts.executor.run(view, self._batch, source, probes, trace)
        trace.end()
        rows = len(self._placed)
        self.logits: np.ndarray = np.asarray(self._first.logits)[:rows]
        self.token_ids: np.ndarray = self._first.token_ids[:rows]
        self.traces: Sequence[Trace] = _shares(trace, self._first, rows, units)
        self._reselect = Reselect(
            view=view,
            source=source,
            probes=probes,
            memory=parts.memory,
            compute=parts.compute,
            plan=parts.plan,
            system=parts.system,
            limits=self._batch.limits,
        )

    def decoder(self) -> Decoder:
        """See `Session`."""
        if not self._first.contexts:
            name = self._parts.system.name
            raise ValueError(f"got a generation, but system {name!r} serves first tokens only")
        return Decoder.after(
            self._first.contexts,
            lengths=self._batch.lengths,
            start=self._prefix.num_tokens,
            compute=self._parts.compute,
            rows=self._parts.rows,
            pool=self._parts.memory.pool,
            plan=self._parts.plan,
            reselect=self._reselect,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.close()


class DenseSession:
    """One request with nothing from the store: a dense prefill of all its tokens."""

    def __init__(self, parts: Parts, placed: Placed, *, hold: bool) -> None:
        self._parts = parts
        self._blocks: list[np.ndarray] = []
        tokens = placed.tokens
        trace = Trace()
        start = time.perf_counter_ns()
        last = None
        for last in parts.prefill.run(tokens):
            if hold:
                self._blocks.append(np.asarray(last.kv)[:, :, : last.length])
        assert last is not None  # a suffix has at least one token
        logits, token = parts.compute.head(last.hidden, np.array([last.length - 1], np.int32))
        self.logits: np.ndarray = np.asarray(logits)
        self.token_ids: np.ndarray = np.asarray(token)
        trace.add("compute", "compute", start, time.perf_counter_ns())
        trace.end()
        self.traces: Sequence[Trace] = (trace,)

    def decoder(self) -> Decoder:
        """See `Session`."""
        return Decoder.dense(
            np.concatenate(self._blocks, axis=2),
            compute=self._parts.compute,
            rows=self._parts.rows,
            pool=self._parts.memory.pool,
            plan=self._parts.plan,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._blocks.clear()


def _shares(trace: Trace, first: FirstToken, rows: int, units: int) -> list[Trace]:
    """Each row's own view of the batch's trace: what was read is common, the selection is not."""
    return [
        trace.share(
            selected=sum(int((chosen[row] >= 0).sum()) for chosen in first.selections),
            total=len(first.selections) * units,
            attention_mass=first.attention_mass[:, row].tolist(),
        )
        for row in range(rows)
    ]
