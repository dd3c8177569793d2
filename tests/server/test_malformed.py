"""Traffic that no client should send: never a 5xx but 503, never a hang, always a JSON answer.

CKV_MALFORMED=2000 sends so many requests in place of a few.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.serving import MODEL

from ckv_jax import Engine
from ckv_jax.server.app import create_app
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.prefixes import NewPrefix
from ckv_jax.server.schema import ChatRequest, CompletionRequest

REQUESTS = int(os.environ.get("CKV_MALFORMED", "150"))
ROUTES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/prefixes": NewPrefix,
}
GOOD = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "prompt": "Hello",
    "text": "Hello",
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "n": 1,
    "stream": True,
    "stop": ["."],
    "ckv": {"budget": 0.5},
    "logprobs": 1,
}

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=12)
    | st.sampled_from([0, -1, 2**63, 1e308, "", "\x00", "\ud800", MODEL, f"{MODEL}:sparse"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route, and a body that is nearly right, or nothing of the kind."""
    route = draw(st.sampled_from(sorted(ROUTES)))
    if draw(st.integers(0, 9)) == 0:
        return route, draw(st.binary(max_size=60))
    names = sorted(ROUTES[route].model_fields)
    body = {name: GOOD[name] for name in names if name in GOOD}
    for name in draw(st.lists(st.sampled_from([*names, "surprise"]), max_size=3)):
        body[name] = draw(anything)
    for name in draw(st.lists(st.sampled_from(names), max_size=1)):
        body.pop(name, None)
    data = json.dumps(body).encode()
    return route, data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def app(engine: Engine) -> Iterator[object]:
    config = ServerConfig(model=MODEL, max_tokens=2, request_s=2, store_tokens=10_000)
    app = create_app(engine, config)
    yield app
    app.state.service.close()


@settings(
    max_examples=REQUESTS,
    deadline=None,
    derandomize="CKV_MALFORMED" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(request=requests(), kind=st.sampled_from(["application/json", "text/plain", ""]))
def test_whatever_comes_is_answered(
    app: object, loop: asyncio.AbstractEventLoop, request: tuple[str, bytes], kind: str
) -> None:
    route, body = request

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"content-type": kind} if kind else {}
            return await asyncio.wait_for(client.post(route, content=body, headers=headers), 60)

    answer = loop.run_until_complete(send())
    assert answer.status_code < 500 or answer.status_code == 503, (body, answer.text)
    if answer.headers["content-type"].startswith("application/json"):
        told = answer.json()
        if answer.status_code >= 400:
            assert set(told["error"]) == {"message", "type", "param", "code"}
    else:
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/", "//", "/v1/%ff", "/v1/prefixes/" + "a" * 999]
)
def test_any_method_at_any_path(
    app: object, loop: asyncio.AbstractEventLoop, method: str, path: str
) -> None:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path)

    assert loop.run_until_complete(send()).status_code < 500
