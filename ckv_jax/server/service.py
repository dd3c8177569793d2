"""What the routes of one application share: the way of every question through the server."""

from __future__ import annotations

import asyncio
import threading
import time

from fastapi import Request
from opentelemetry.trace import TracerProvider
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ckv_jax.engine import Engine
from ckv_jax.server import log, warm
from ckv_jax.server.answering import Answering
from ckv_jax.server.asked import Asking
from ckv_jax.server.behind import Behind
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.delivery import Client, Delivery
from ckv_jax.server.gate import Gate
from ckv_jax.server.latest import Latest
from ckv_jax.server.metrics import Metrics
from ckv_jax.server.schema import ChatRequest, CompletionRequest
from ckv_jax.server.shapes import ChatShape, CompletionShape, Shape
from ckv_jax.server.spans import Spans
from ckv_jax.server.tenants import Tenant, Tenants
from ckv_jax.server.watch import Watch


class Service:
    """One engine, served. Used in one event loop; `close` it before the engine.

    Raises `ValueError` for an engine that cannot generate text.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        tenants: Tenants,
        tracing: TracerProvider | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise ValueError("got an engine without a tokenizer, expected one that reads text")
        if engine.system.executor is not None or engine.system.selector == "none":
            raise ValueError(
                f"got system {engine.system.name!r}, which gives first tokens only; expected ckv "
                "or contiguous-kv"
            )
        warm.check(engine, config.warm_tokens)
        self.engine = engine
        self.config = config
        self.tenants = tenants
        self.started = int(time.time())
        self.gate = Gate(config.max_requests)
        self.asking = Asking(engine, config)
        self.behind = Behind(engine, config)
        self.metrics = Metrics(engine, self.gate, self.behind)
        self.latest = Latest()
        self._spans = Spans(tracing)
        self._end_at: float | None = None
        self._answering = Answering(engine, self.behind)
        self._tokenizer = engine.tokenizer
        self._cold = threading.Thread(
            target=warm.warm_up, args=(engine, config), name="ckv-warm-up", daemon=True
        )
        if config.warm_tokens:
            self._cold.start()

    @property
    def warming(self) -> bool:
        """Whether what first requests need is still being compiled."""
        return self._cold.is_alive()

    def warmed(self) -> None:
        """Returns once nothing is being compiled ahead."""
        if self.warming:
            self._cold.join()

    def tenant(self, http: Request) -> Tenant:
        """Whose request this is; the log says so, too. Raises `ApiError` 401."""
        found = self.tenants.of(http.headers.get("authorization"))
        record: log.Record = http.state.record
        record.fields["tenant"] = found.name
        return found

    async def answer(self, http: Request, body: ChatRequest | CompletionRequest) -> Response:
        """The answer to either kind of question."""
        tenant = self.tenant(http)
        self.asking.check(body)
        record: log.Record = http.state.record

        async def deliver(client: Client) -> None:
            with self.gate.enter(tenant, body.texts):
                if isinstance(body, ChatRequest):
                    asked = await run_in_threadpool(self.asking.chat, body, tenant)
                    shape: Shape = ChatShape(asked, self._tokenizer)
                else:
                    asked = await run_in_threadpool(self.asking.completion, body, tenant)
                    shape = CompletionShape(asked, self._tokenizer)
                way = self._answering.streamed if body.stream else self._answering.whole
                watch = self._watch(http, record)
                with watch.over(asked):
                    await way(asked, shape, client, watch)

        return Delivery(deliver, undelivered=record.undelivered, send_s=self.config.send_s)

    def _watch(self, http: Request, record: log.Record) -> Watch:
        return Watch(http, record, metrics=self.metrics, spans=self._spans, latest=self.latest)

    def ended(self, record: log.Record) -> None:
        """A request of any kind is over."""
        self.metrics.replied(record.path, record.status, delivered=record.why is None)

    async def drain(self) -> None:
        """Refuses who comes, waits for those inside and for what is written behind them, as long
        as `drain_s` says, `close` included."""
        self.gate.close()
        self._end_at = time.monotonic() + self.config.drain_s
        try:
            async with asyncio.timeout(self._left_s):
                await self.gate.empty()
            written = await asyncio.to_thread(self.behind.flush, self._left_s)
        except TimeoutError:
            written = False
        if not written:
            log.event("drain_over", left=self.gate.inside)

    def give_up(self) -> None:
        """Nothing is waited for any more: `drain` and `close` return as soon as they can."""
        self._end_at = time.monotonic()
        self.behind.give_up()

    def close(self) -> None:
        """Ends what writes behind answers: what it is writing is finished within what is left of
        `drain_s`, what waits is given up."""
        self.behind.close(self._left_s)

    @property
    def _left_s(self) -> float:
        """Seconds that are left to stop in."""
        if self._end_at is None:
            return self.config.drain_s
        return max(0.0, self._end_at - time.monotonic())
