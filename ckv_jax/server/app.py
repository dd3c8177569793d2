"""The HTTP application: its routes, and a process that serves it until a signal."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from importlib.resources import files
from types import FrameType
from typing import Any

import uvicorn
from opentelemetry.trace import TracerProvider
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from ckv_jax.engine import Engine
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.http import (
    PROMETHEUS,
    ApiError,
    Connections,
    JsonResponse,
    check_host,
    draining,
    engine_stopped,
    install_error_handlers,
    raise_descriptor_limit,
)
from ckv_jax.server.observability import log_event, log_requests
from ckv_jax.server.prefixes import prefix_routes
from ckv_jax.server.schema import ChatRequest, CompletionRequest
from ckv_jax.server.service import Service
from ckv_jax.server.tenants import Tenants
from ckv_jax.trace import MEANING

_LEFT_S = 2  # for open connections after the drain


def create_app(
    engine: Engine,
    config: ServerConfig,
    tenants: Tenants | None = None,
    *,
    tracing: TracerProvider | None = None,
) -> Starlette:
    """The application over `engine`. Its `state.service` is the `Service`, to be closed first.

    Args:
        tracing: receives the spans of requests; None: OpenTelemetry's own default.

    Raises `ValueError` for an engine that cannot generate text.
    """
    tenants = tenants or Tenants()
    service = Service(engine, config, tenants, tracing)
    middleware = [Middleware(log_requests, ended=service.metrics.replied)]
    if config.cors_origins:
        exposed = ["x-request-id", "retry-after", "x-ckv-attention-covered"]
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
        middleware.append(cors)
    if tenants.open:
        middleware.append(Middleware(check_host, allowed=config.allowed_hosts))
    routes = [*model_routes(service), *prefix_routes(service), *status_routes(service)]
    app = Starlette(routes=routes, middleware=middleware)
    app.state.service = service
    install_error_handlers(app)
    return app


def model_routes(service: Service) -> list[Route]:
    """The models, chats and completions of OpenAI's API."""

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "ckv_jax",
            "max_model_len": service.engine.model_config.max_position_embeddings,
        }

    async def models(http: Request) -> Response:
        """Lists the model and its sparse alias."""
        service.tenant(http)
        return JsonResponse({"object": "list", "data": [card(m) for m in service.parser.models]})

    async def model(http: Request) -> Response:
        """Describes one model."""
        service.tenant(http)
        name = http.path_params["name"]
        service.parser.check_model(name)
        return JsonResponse(card(name))

    async def chat(http: Request) -> Response:
        """Generates the next message of a chat."""
        return await service.answer(http, ChatRequest)

    async def completions(http: Request) -> Response:
        """Generates the continuation of a text."""
        return await service.answer(http, CompletionRequest)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", service.respond, methods=["POST"]),
        Route("/v1/messages", service.message, methods=["POST"]),
    ]


def status_routes(service: Service) -> list[Route]:
    """Health, readiness, metrics and the status page.

    The page has no figures of its own; the figures that it requests need a key.
    """
    scrape: asyncio.Future[bytes] | None = None
    page = files("ckv_jax.server").joinpath("status.html").read_text(encoding="utf-8")

    async def health(_: Request) -> Response:
        """Answers 200 while the process is alive."""
        return JsonResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        """Answers 200 when the server is ready, 503 while it is warming up or stopping, or
        if its engine has stopped."""
        if service.limiter.closed:
            raise draining()
        if service.engine.closed:
            raise engine_stopped()
        if service.warming:
            message = "the server is warming up; requests sent now wait until it is ready"
            raise ApiError(503, message, code="warming_up", retry_s=5)
        return JsonResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        """Returns metrics for Prometheus, from a separate thread that no request delays. Requests
        that come while they are read share them."""
        nonlocal scrape
        if scrape is None or scrape.done():
            loop = asyncio.get_running_loop()
            scrape = loop.run_in_executor(service.scrapes, service.metrics.text)
        return Response(await asyncio.shield(scrape), media_type=PROMETHEUS)

    async def status_page(_: Request) -> HTMLResponse:
        """Returns the status page, for browsers."""
        return HTMLResponse(page)

    async def status(http: Request) -> Response:
        """Returns the state of the engine, and the stages of the time to first token with what the
        engine does in each."""
        service.tenant(http)
        return JsonResponse(
            {
                "answers_in_progress": service.limiter.under_way,
                "ttft_ms": service.metrics.breakdown_ms(),
                "stages": {"queue": "waiting for other answers", **MEANING},
                "engine": service.engine.stats().to_json(),
            }
        )

    return [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/", status_page),
        Route("/v1/status", status),
    ]


def bind(host: str, port: int) -> socket.socket:
    """A socket on `host` and `port` (0: any free one) that does not listen yet.

    Raises `ValueError` if it is taken, not allowed, or no address of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(
            f"got {host}:{port}, expected an address of this machine: {error}"
        ) from error
    bound = socket.socket(family, kind, proto)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} on {host} is in use"
        else:
            what = f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
        option = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ValueError(f"{what}; select another with {option}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run(app: Starlette, bound: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT; then refuses new requests, and ends after those in progress.

    A second signal ends it at once. Main thread.
    """
    service: Service = app.state.service
    connections = Connections(raise_descriptor_limit(), send_s=service.config.send_s)
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_LEFT_S,
    )
    _Server(config, service).run(sockets=[bound])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            log_event("serving", url=url_of(bound), model=self._service.config.model)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called in the main thread, in which the event loop runs."""
        loop = asyncio.get_running_loop()
        if self._draining is None:
            self._draining = loop.create_task(self._drain(sig))
        else:
            self.should_exit = self.force_exit = True
            # Not from the signal handler: it takes a lock that this thread may hold.
            loop.call_soon_threadsafe(self._service.give_up)

    async def _drain(self, sig: int) -> None:
        under_way = self._service.limiter.under_way
        log_event("draining", signal=signal.Signals(sig).name, answers=under_way)
        await self._service.drain()
        self.should_exit = True
