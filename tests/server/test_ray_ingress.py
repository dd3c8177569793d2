"""The ingress of the replicas: which faults are tried again, and which are reported."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="replicas need the extra `ray`")

with warnings.catch_warnings(action="ignore"):  # Ray's own
    from ray.exceptions import ActorDiedError, RayTaskError
    from ray.serve.exceptions import BackPressureError

    from ckv_jax.server.ray_app import Ingress, ReplicaMetrics

from server.applications import TENANTS
from server.serving import KEYS
from starlette.requests import Request
from starlette.responses import Response

from ckv_jax.server.config import ServerConfig
from ckv_jax.server.tenants import Tenant, Tenants


def test_figures_of_all_replicas_are_one_page() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    pages = []
    for by in (1, 2):
        registry = CollectorRegistry()
        Counter("asked", "Asked { so far", ["path"], registry=registry).labels("/a { b").inc(by)
        Counter("plain", "No labels", registry=registry).inc(10 * by)
        Histogram("took", "Seconds", registry=registry).observe(by)
        Gauge("vllm:waiting", "Of another server", registry=registry).set(by)
        pages.append((f"r{by}", generate_latest(registry).decode()))
    page = generate_latest(ReplicaMetrics(pages)).decode()
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families)
    samples = {(s.name, *s.labels.items()): s.value for f in families for s in f.samples}
    for by in (1, 2):
        labels = ("replica", f"r{by}")
        assert samples["asked_total", ("path", "/a { b"), labels] == by
        assert samples["plain_total", labels] == 10 * by
        assert samples["took_sum", labels] == samples["vllm:waiting", labels] == by


class Replicas:
    """A handle all of whose replicas fail in the same way, after the same messages."""

    def __init__(self, error: Exception, *messages: dict) -> None:
        self.asked = 0
        self.answer = SimpleNamespace(remote=self._remote)
        self._error = error
        self._messages = messages

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    async def _remote(self, **_: object) -> AsyncIterator[dict]:
        self.asked += 1
        for message in self._messages:
            yield message
        raise self._error


async def asked(
    ingress: Ingress, path: str, receive: Callable[[], Awaitable[dict]], key: str = "",
    *, method: str = "POST", origin: str = "",
) -> Response:  # fmt: skip
    """What a request gets whose body comes by `receive`."""
    headers = [(b"x-api-key", key.encode()), (b"origin", origin.encode())]
    scope = {
        "type": "http", "method": method, "path": path, "headers": headers,
        "query_string": b"", "server": ("test", 80), "scheme": "http",
    }  # fmt: skip
    return await ingress(Request(scope, receive))


@pytest.mark.parametrize(
    ("error", "status", "tries"),
    [
        (RayTaskError("answer", "in the application", ValueError("secret")), 500, 1),
        (BackPressureError(num_queued_requests=7, max_queued_requests=7), 429, 1),
        (ActorDiedError(), 503, 4),
    ],
)
def test_only_replicas_that_are_gone_are_replaced(
    error: Exception, status: int, tries: int
) -> None:
    replicas = Replicas(error)
    ingress = Ingress(replicas, ServerConfig(model="a"), Tenants())  # type: ignore[arg-type]

    async def receive() -> dict:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    answer = asyncio.run(asked(ingress, "/v1/completions", receive))
    assert (answer.status_code, replicas.asked) == (status, tries)
    assert "secret" not in json.loads(bytes(answer.body))["error"]["message"]


@pytest.mark.parametrize(("name", "kind"), [("", None), ("event: a\n", "error")])
def test_an_error_ends_a_stream_in_its_form(name: str, kind: str | None) -> None:
    start = {"status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    first = {"body": f"{name}data: {{}}\n\n".encode()}
    ingress = Ingress(
        Replicas(ActorDiedError(), start, first),  # type: ignore[arg-type]
        ServerConfig(model="a"),
        Tenants(),
    )

    async def receive() -> dict:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def scene() -> list[bytes]:
        answer = await asked(ingress, "/v1/messages", receive)
        return [part async for part in answer.body_iterator]  # type: ignore[attr-defined]

    events = asyncio.run(scene())
    assert events[0] == first["body"]
    before, data = events[1].decode().split("data: ")
    assert before == (f"event: {kind}\n" if kind else "")
    assert json.loads(data).get("type") == kind
    assert json.loads(data)["error"]["code"] == "lost"


def test_no_body_is_read_without_a_key_or_outside_of_v1() -> None:
    """A browser asks without a key which methods it may use, and reads the errors."""
    replicas = Replicas(RayTaskError("answer", "in the application", ValueError("secret")))
    keys = Tenants({KEYS["alice"]: Tenant(name="alice")})
    page = "https://app.example"
    config = ServerConfig(model="a", cors_origins=(page,))
    ingress = Ingress(replicas, config, keys)  # type: ignore[arg-type]

    async def receive() -> dict:
        raise AssertionError("read")

    for origin in (page, "https://evil.example", ""):
        refused = asyncio.run(asked(ingress, "/v1/completions", receive, origin=origin))
        assert refused.status_code == 401
        allowed = refused.headers.get("access-control-allow-origin")
        assert allowed == (page if origin == page else None)
    assert replicas.asked == 0
    answer = asyncio.run(asked(ingress, "/metrics", receive))
    assert (answer.status_code, replicas.asked) == (500, 1)
    ask = asked(ingress, "/v1/completions", receive, method="OPTIONS", origin=page)
    assert (asyncio.run(ask).status_code, replicas.asked) == (500, 2)


def test_bodies_that_arrive_have_a_bound() -> None:
    replicas = Replicas(BackPressureError(num_queued_requests=7, max_queued_requests=7))
    config = ServerConfig(model="a", max_body_bytes=200_000)
    ingress = Ingress(replicas, config, Tenants(TENANTS))  # type: ignore[arg-type]

    async def scene() -> None:
        more = asyncio.Event()

        def body() -> Callable[[], Awaitable[dict]]:
            parts = [b"x" * 150_000, b"x"]

            async def receive() -> dict:
                if len(parts) == 1:
                    await more.wait()
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

            return receive

        ask = partial(asked, ingress, "/v1/completions")
        first = asyncio.create_task(ask(body(), KEYS["alice"]))
        await asyncio.sleep(0)
        busy = await asyncio.wait_for(ask(body(), KEYS["alice"]), 10)
        assert busy.status_code == 429
        assert "too many large requests" in bytes(busy.body).decode()
        other = asyncio.create_task(ask(body(), KEYS["bob"]))
        await asyncio.sleep(0)
        assert replicas.asked == 0
        more.set()
        await asyncio.gather(first, other)
        assert replicas.asked == 2

    asyncio.run(scene())
