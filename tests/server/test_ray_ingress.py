"""The ingress of the replicas: which faults are tried again, and which are reported."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="replicas need the extra `ray`")

with warnings.catch_warnings(action="ignore"):  # Ray's own
    from ray.exceptions import ActorDiedError, RayTaskError
    from ray.serve.exceptions import BackPressureError

    from ckv_jax.server.ray_app import Ingress

from starlette.requests import Request
from starlette.responses import Response

from ckv_jax.server.config import ServerConfig
from ckv_jax.server.tenants import Tenants


class Replicas:
    """A handle all of whose replicas fail in the same way."""

    def __init__(self, error: Exception) -> None:
        self.asked = 0
        self.answer = SimpleNamespace(remote=self._remote)
        self._error = error

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    async def _remote(self, **_: object) -> AsyncIterator[dict]:
        self.asked += 1
        raise self._error
        yield {}


@pytest.mark.parametrize(
    ("error", "status", "asked"),
    [
        (RayTaskError("answer", "in the application", ValueError("secret")), 500, 1),
        (BackPressureError(num_queued_requests=7, max_queued_requests=7), 429, 1),
        (ActorDiedError(), 503, 4),
    ],
)
def test_only_replicas_that_are_gone_are_replaced(
    error: Exception, status: int, asked: int
) -> None:
    replicas = Replicas(error)
    ingress = Ingress(replicas, ServerConfig(model="a"), Tenants())  # type: ignore[arg-type]

    async def ask() -> Response:
        async def receive() -> dict:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
            "query_string": b"", "server": ("test", 80), "scheme": "http",
        }  # fmt: skip
        return await ingress(Request(scope, receive))

    answer = asyncio.run(ask())
    assert (answer.status_code, replicas.asked) == (status, asked)
    assert "secret" not in json.loads(bytes(answer.body))["error"]["message"]
