"""The application: routes, and what every request passes on its way to them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ckv_jax.engine import Engine
from ckv_jax.server import log
from ckv_jax.server.answering import Answering
from ckv_jax.server.asked import Asking
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.delivery import Client, Delivery
from ckv_jax.server.errors import draining, install_error_handlers
from ckv_jax.server.gate import Gate
from ckv_jax.server.json_answer import JsonAnswer
from ckv_jax.server.limits import BodyLimit
from ckv_jax.server.schema import ChatRequest, CompletionRequest
from ckv_jax.server.shapes import ChatShape, CompletionShape, Shape
from ckv_jax.server.tenants import Tenants


class Service:
    """What the routes of one application share. Used in one event loop."""

    def __init__(self, engine: Engine, config: ServerConfig, tenants: Tenants) -> None:
        if engine.tokenizer is None:
            raise ValueError("got an engine without a tokenizer, expected one that reads text")
        if not engine.system.chunked:
            raise ValueError(
                f"got system {engine.system.name!r}, which gives first tokens only; expected ckv "
                "or contiguous-kv"
            )
        self.engine = engine
        self.config = config
        self.tenants = tenants
        self.started = int(time.time())
        self.gate = Gate(config.max_requests)
        self.asking = Asking(engine, config)
        self.answering = Answering(engine)
        self._tokenizer = engine.tokenizer

    async def answer(self, http: Request, body: ChatRequest | CompletionRequest) -> Response:
        """The answer to either kind of question."""
        tenant = self.tenants.of(http.headers.get("authorization"))
        self.asking.check(body)
        record: log.Record = http.state.record
        record.fields["tenant"] = tenant.name

        async def deliver(client: Client) -> None:
            with self.gate.enter(tenant, body.texts):
                if isinstance(body, ChatRequest):
                    asked = await run_in_threadpool(self.asking.chat, body, tenant)
                    shape: Shape = ChatShape(asked, self._tokenizer)
                else:
                    asked = await run_in_threadpool(self.asking.completion, body, tenant)
                    shape = CompletionShape(asked, self._tokenizer)
                record.asked(asked)
                way = self.answering.streamed if body.stream else self.answering.whole
                await way(asked, shape, client)

        return Delivery(
            deliver,
            undelivered=lambda why: record.fields.update(undelivered=why),
            send_s=self.config.send_s,
        )

    async def drain(self) -> None:
        """Refuses who comes, and waits for those inside as long as `drain_s` says."""
        self.gate.close()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.gate.empty()
        except TimeoutError:
            log.event("drain_over", left=self.gate.inside)


def create_app(engine: Engine, config: ServerConfig, tenants: Tenants | None = None) -> FastAPI:
    """The application over `engine`, which it does not close. Its `state.service` is the `Service`.

    Raises `ValueError` for an engine that cannot generate text.
    """
    service = Service(engine, config, tenants or Tenants())
    app = FastAPI(
        title="ckv_jax",
        summary="OpenAI's API over prefixes whose KV cache lies on SSD",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, seconds=config.body_s)
    app.add_middleware(log.Records)  # the outermost
    install_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        """Whether the process lives."""
        return JsonAnswer({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are taken: not while the server is stopping."""
        if service.gate.closed:
            raise draining()
        return JsonAnswer({"status": "ok"})

    @app.get("/v1/models")
    async def models(http: Request) -> Response:
        """The model, and its sparse alias."""
        service.tenants.of(http.headers.get("authorization"))
        return JsonAnswer({"object": "list", "data": [card(m) for m in service.asking.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, http: Request) -> Response:
        """One of them."""
        service.tenants.of(http.headers.get("authorization"))
        service.asking.check_model(name)
        return JsonAnswer(card(name))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request) -> Response:
        """A chat goes on."""
        return await service.answer(http, body)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """A text goes on."""
        return await service.answer(http, body)

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "ckv_jax",
            "max_model_len": engine.model_config.max_position_embeddings,
        }

    return app
