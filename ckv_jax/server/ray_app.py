"""The server on Ray Serve: replicas of the application behind an ingress that routes by prefix.

    serve run ckv_jax.server.ray_app:build checkpoint=… store=… name=…

Values on this command line are strings; numbers (`replicas`) and mappings (`engine`) need a config
file, see `deploy/kuberay.yaml`.

All replicas share one store. The ingress reads each whole request and sends it to the replica that
had the same prefix before. If that replica is full or gone, another one gets the request and reads
the KV that the first has stored. A request whose replica dies before its answer starts is sent to
another replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ckv_jax.server.bodies import Bodies, Limits, prefix_key
from ckv_jax.server.config import ServerConfig, Settings
from ckv_jax.server.http import PROMETHEUS, ApiError, JsonResponse, as_api_error
from ckv_jax.server.tenants import Tenants

_log = logging.getLogger("ckv_jax.server")
_SCOPE = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
_TRIES = 4
_DIED = (ActorDiedError, ActorUnavailableError)
_INGRESS_PATHS = frozenset(("/health", "/ready"))
_REPORTS = frozenset(("/metrics", "/v1/status"))  # of all replicas
_REPORT_S = 8.0  # Prometheus waits 10 s
_DROPPED_HEADERS = frozenset(("content-length", "transfer-encoding", "connection"))


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by the request's key, so that equal prefixes go to the same replica while it
    is alive and has room."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas by rank, best first, one for each rank (rendezvous hashing)."""
        key = "" if pending_request is None else str(pending_request.kwargs.get("key", ""))

        def weight(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{key}\0{replica.replica_id}".encode()).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=weight)]


class Replica:
    """One engine, and the application over it, called by ASGI messages."""

    def __init__(self, settings: Settings) -> None:
        from ckv_jax.config import EngineConfig
        from ckv_jax.engine import Engine
        from ckv_jax.server.app import create_app
        from ckv_jax.server.observability import log_to_stderr
        from ckv_jax.storage.config import StoreConfig

        log_to_stderr()
        tenants = settings.tenants()
        quotas = {t.salt: t.max_bytes for t in tenants.all() if t.max_bytes is not None}
        self._engine = Engine.from_pretrained(
            settings.checkpoint,
            store=settings.store,
            config=EngineConfig(**{"dtype": "bfloat16", "budget": 1.0, **settings.engine}),
            store_config=StoreConfig(**{**settings.storage, "quotas": quotas}),
        )
        self._app = create_app(self._engine, settings.config, tenants)
        self._app.state.service.wait_warm()

    async def answer(
        self, *, key: str, scope: Mapping[str, Any], body: bytes
    ) -> AsyncIterator[dict[str, Any]]:
        """The ASGI messages of one response. `key` is for the router, and for ids of responses."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        disconnected = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            messages.put_nowait(dict(message))

        async def run() -> None:
            try:
                await self._app({**scope, "app": self._app, "prefix_key": key}, receive, send)
            finally:
                messages.put_nowait(None)

        work = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await work
        finally:
            disconnected.set()

    async def report(self, scope: Mapping[str, Any]) -> tuple[str, int, bytes]:
        """This replica's id, and the status and body of what it answers to a GET."""
        start, *rest = [part async for part in self.answer(key="", scope=scope, body=b"")]
        name = serve.get_replica_context().replica_id.unique_id
        return name, start["status"], b"".join(part["body"] for part in rest)

    def check_health(self) -> None:
        """Raises `RuntimeError` if the engine has stopped; Serve then replaces this replica."""
        if self._engine.closed:
            raise RuntimeError("the engine has stopped")

    def __del__(self) -> None:
        if "_app" in self.__dict__:
            service = self._app.state.service
            service.write_behind.flush(service.config.drain_s)
            service.close()
            self._engine.close()


class Ingress:
    """Sends each request to a replica, and to another one if that dies."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig, tenants: Tenants) -> None:
        self._replicas = replicas.options(stream=True)
        self._all = replicas
        limits = Limits(max_bytes=config.max_body_bytes)
        self._bodies = Bodies(limits, config.body_s, share=tenants.share(2) / 2)
        self._tenants = tenants
        self._origins = frozenset(config.cors_origins)

    async def __call__(self, request: Request) -> Response:
        """Answers one request; `/health` and `/ready` by itself, since Serve starts an ingress
        after its replicas."""
        if request.url.path in _INGRESS_PATHS:
            return JsonResponse({"status": "ok"})
        try:
            answer = await self._answer(request)
        except BackPressureError:
            busy = "the server is busy"
            answer = ApiError(429, busy, code="rate_limit_exceeded", retry_s=1).response()
        except Exception as error:
            answer = as_api_error(error).response()
        origin = request.headers.get("origin")
        if origin and not self._origins.isdisjoint((origin, "*")):
            answer.headers.setdefault("access-control-allow-origin", origin)
            answer.headers.setdefault("access-control-expose-headers", "retry-after")
            answer.headers.add_vary_header("Origin")
        return answer

    async def _answer(self, request: Request) -> Response:
        body, key = b"", ""  # nothing outside of /v1/ takes a body, and OPTIONS needs no API key
        if request.url.path.startswith("/v1/") and request.method != "OPTIONS":
            tenant = self._tenants.of(request.headers)  # a key before a body
            async with self._bodies.read(request, tenant.name) as received:
                body = bytes(received)
                key = await asyncio.to_thread(prefix_key, body)
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        if request.url.path in _REPORTS and request.method == "GET":
            return await self._report(request.url.path, scope)
        for left in reversed(range(_TRIES)):
            messages = self._replicas.answer.remote(key=key, scope=scope, body=body)
            try:
                start = await anext(messages)
                headers = _headers(start)
                if headers.get("content-type", "").startswith("text/event-stream"):
                    first = await anext(messages)
                    events = _events(first, messages)
                    return StreamingResponse(events, start["status"], headers)
                whole = b"".join([message["body"] async for message in messages])
                return Response(whole, start["status"], headers)
            except _DIED as error:
                if not left:
                    raise lost() from error
                _log.warning("a replica died: trying another (%s)", type(error).__name__)
                await asyncio.sleep(0.2)
        raise AssertionError("unreachable")

    async def _report(self, path: str, scope: Mapping[str, Any]) -> Response:
        """Collects the reports of all live replicas."""
        asked = self._all.broadcast("report", scope=scope)
        found = await asked.results_async(timeout_s=_REPORT_S, return_exceptions=True)
        reports = sorted(one for one in found if not isinstance(one, BaseException))
        if not reports:
            raise lost()
        for _, status, body in reports:
            if status != 200:
                return Response(body, status, media_type="application/json")
        if path == "/metrics":
            every = ReplicaMetrics([(name, body.decode()) for name, _, body in reports])
            return Response(generate_latest(every), media_type=PROMETHEUS)
        each = [{"replica": name} | json.loads(body) for name, _, body in reports]
        return JsonResponse(each[0] | {"replicas": each})


class ReplicaMetrics(Collector):
    """The metrics of all replicas by (name, Prometheus' text); samples have the label `replica`."""

    def __init__(self, reports: Sequence[tuple[str, str]]) -> None:
        self._reports = reports

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._reports:
            for one in text_string_to_metric_families(text):
                new = Metric(one.name, one.documentation, one.type)
                family = families.setdefault(one.name, new)
                for sample in one.samples:
                    labels = {"replica": replica, **sample.labels}
                    family.add_sample(sample.name, labels, sample.value)
        return families.values()


def _headers(start: Mapping[str, Any]) -> dict[str, str]:
    pairs = [(name.decode(), value.decode()) for name, value in start["headers"]]
    return {name: value for name, value in pairs if name not in _DROPPED_HEADERS}


async def _events(
    first: Mapping[str, Any], messages: AsyncIterator[Mapping[str, Any]]
) -> AsyncIterator[bytes]:
    """The body of a stream. An error on the way becomes its last event: it cannot start again."""
    yield first["body"]
    try:
        async for message in messages:
            yield message["body"]
    except Exception as error:
        reported = lost() if isinstance(error, _DIED) else as_api_error(error)
        yield reported.event(named=first["body"].startswith(b"event:"))


def lost() -> ApiError:
    """Error 503: a replica died, and no other can continue its answer."""
    return ApiError(503, "the replica was lost during this answer", code="lost", retry_s=5)


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application for `serve run` and Serve's config files; `args` are `Settings`.

    Raises `TypeError` for an unknown setting, `ValueError` for a wrong value.
    """
    settings = Settings(**args)
    config = settings.config
    replicas = serve.deployment(
        Replica,
        name="replica",
        num_replicas=settings.replicas,
        max_ongoing_requests=config.max_requests,
        max_queued_requests=settings.replicas * config.max_requests,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=config.drain_s,
    ).bind(settings)
    tenants = settings.tenants()
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        max_ongoing_requests=10 * settings.replicas * config.max_requests,
        ray_actor_options={"num_cpus": 0},  # the replicas may take every processor
    )
    application: serve.Application = ingress.bind(replicas, config, tenants)
    return application
