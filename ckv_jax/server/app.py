"""The application: routes, and what every request passes on its way to them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from opentelemetry.trace import TracerProvider
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ckv_jax.engine import Engine
from ckv_jax.server import log
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.errors import ApiError, draining, install_error_handlers
from ckv_jax.server.json_answer import JsonAnswer
from ckv_jax.server.limits import BodyLimit
from ckv_jax.server.metrics import CONTENT_TYPE
from ckv_jax.server.prefixes import add_prefix_routes
from ckv_jax.server.schema import ChatRequest, CompletionRequest
from ckv_jax.server.service import Service
from ckv_jax.server.status import add_status_routes
from ckv_jax.server.tenants import Tenants


def create_app(
    engine: Engine,
    config: ServerConfig,
    tenants: Tenants | None = None,
    *,
    tracing: TracerProvider | None = None,
) -> FastAPI:
    """The application over `engine`. Its `state.service` is the `Service`, to be closed first.

    `tracing`: where spans go; None: OpenTelemetry's own default. Raises `ValueError` for an engine
    that cannot generate text.
    """
    service = Service(engine, config, tenants or Tenants(), tracing)
    app = FastAPI(
        title="ckv_jax",
        summary="OpenAI's API over prefixes whose KV cache lies on SSD",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, seconds=config.body_s)
    app.add_middleware(log.Records, ended=service.ended)  # the outermost
    install_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        """Whether the process lives."""
        return JsonAnswer({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether it is time to send requests: not while the server warms up or is stopping."""
        if service.gate.closed:
            raise draining()
        if service.warming:
            message = "the server is warming up; what comes now waits for it"
            raise ApiError(503, message, code="warming_up", retry_s=5)
        return JsonAnswer({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counts and gauges, as Prometheus reads them."""
        return Response(await run_in_threadpool(service.metrics.text), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models(http: Request) -> Response:
        """The model, and its sparse alias."""
        service.tenant(http)
        return JsonAnswer({"object": "list", "data": [card(m) for m in service.asking.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, http: Request) -> Response:
        """One of them."""
        service.tenant(http)
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

    add_prefix_routes(app, service)
    add_status_routes(app, service)
    return app
