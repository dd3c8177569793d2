"""Connections that say nothing, too many of them, pages of strangers, and the end of a server."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import pytest
from server.applications import ALICE, TENANTS, TEXT, WAY, cached, chat, serving
from server.serving import MODEL, Served, in_thread, post
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ckv_jax import Engine
from ckv_jax.server.app import create_app
from ckv_jax.server.bodies import Bodies, Limits
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.http import ApiError, Connection, Connections, is_allowed
from ckv_jax.server.tenants import Tenants


@contextmanager
def bounded(engine: Engine, connections: Connections) -> Iterator[tuple[str, int]]:
    """The address of an application within bounds of its own."""
    app = create_app(engine, ServerConfig(model=MODEL))
    try:
        with in_thread(app, http=connections.protocol) as url:
            where = urlsplit(url)
            yield str(where.hostname), int(where.port or 0)
    finally:
        app.state.service.close()


def closed(web: socket.socket, seconds: float = 5) -> bool:
    """Whether the server closes a connection within some time."""
    web.settimeout(seconds)
    try:
        return web.recv(4096) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def answer(web: socket.socket) -> bytes:
    """An answer to `HEALTH`, which may come in several pieces."""
    web.settimeout(30)
    found = b""
    while not found.endswith(b"}") and (piece := web.recv(4096)):
        found += piece
    return found


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_a_header_has_a_time(engine: Engine) -> None:
    with bounded(engine, Connections(100, header_s=1.0)) as where:
        for first in (b"", b"G", HEALTH[:-2]):
            began = time.monotonic()  # before the server's clock starts
            with socket.create_connection(where) as web:
                web.sendall(first)
                assert closed(web, 30)
                assert time.monotonic() - began > 0.9
        with socket.create_connection(where) as web:  # byte by byte, and so the next one
            for _ in range(3):
                web.sendall(HEALTH)
                assert b" 200 " in answer(web)
                time.sleep(0.2)
            web.sendall(b"G")
            assert closed(web, 30)


def test_a_long_answer_is_no_late_header(engine: Engine) -> None:
    with bounded(engine, Connections(100, header_s=0.2)) as (host, port):
        body = chat("Count.", max_tokens=500)
        assert post(f"http://{host}:{port}", "chat/completions", body).status_code == 200


@pytest.mark.parametrize("send_s", [60.0, 0.1])
def test_a_client_has_time_to_read_a_whole_answer(send_s: float) -> None:
    """Longer than for a header, and others do not take its place; without end it does not wait."""
    closing = threading.Event()

    class Noted(Connections):
        def close(self, connection: Connection) -> None:
            if connection.asked:
                closing.set()
            super().close(connection)

    size = 32 << 20  # more than the system's own buffers take
    app = Starlette(routes=[Route("/", lambda _: PlainTextResponse("x" * size))])
    connections = Noted(1, header_s=0.1, send_s=send_s)
    with in_thread(app, http=connections.protocol) as url:
        where = urlsplit(url)
        address = (str(where.hostname), int(where.port or 0))
        with socket.create_connection(address, timeout=30) as web:
            web.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            found = len(web.recv(100))
            if send_s > 1:
                with socket.create_connection(address) as other:
                    assert closed(other, 30)
                assert not closing.wait(0.5)
            else:
                assert closing.wait(30)
            while found < size and (piece := web.recv(1 << 20)):
                found += len(piece)
        assert (found >= size) == (send_s > 1)


def test_idle_connections_that_never_asked_are_closed_first(engine: Engine) -> None:
    with bounded(engine, Connections(8)) as where, ExitStack() as crowd:
        keep = crowd.enter_context(socket.create_connection(where))
        keep.sendall(HEALTH)
        assert b" 200 " in answer(keep)
        idle = []
        for _ in range(40):
            idle.append(crowd.enter_context(socket.create_connection(where)))
            idle[-1].sendall(b"G")
        with socket.create_connection(where) as web:
            web.sendall(HEALTH)
            assert b" 200 " in answer(web)
        assert all(closed(web) for web in idle[:30])
        assert not closed(idle[-1], 0.1)
        keep.sendall(HEALTH)
        assert b" 200 " in answer(keep)


def test_one_tenant_leaves_room_for_large_bodies_of_others() -> None:
    bodies = Bodies(Limits(max_bytes=1 << 20), 10, share=0.5)

    class Sent:
        """A request whose body is there at once."""

        headers: ClassVar[dict] = {}
        state = SimpleNamespace()

        async def stream(self) -> AsyncIterator[bytes]:
            yield b" " * 700_000

    async def read() -> None:
        request: Any = Sent()
        async with bodies.read(request, "a"):
            with pytest.raises(ApiError) as refused:
                async with bodies.read(request, "a"):
                    pass
            assert refused.value.status == 429
            async with bodies.read(request, "b"):
                pass
        async with bodies.read(request, "a"):
            pass

    asyncio.run(read())
    bodies.close()


def test_the_limit_of_descriptors_is_raised(served: Served) -> None:
    soft, hard = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, 1 << 20)


def test_few_descriptors_are_enough_for_the_store(checkpoint: Path, tmp_path: Path) -> None:
    """A crowd of idle connections takes no descriptor that the store needs."""
    few = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    command = ("--no-guard-disk", "--store-tokens", 128)
    server = Served(checkpoint, tmp_path / "kv", *command, before=few)
    crowd: list[socket.socket] = []
    try:
        where = urlsplit(server.url)
        body = WAY | {"prompt": TEXT}

        deadline = time.monotonic() + 60  # the text is written after its answer
        while cached(post(server.url, "completions", body)) <= 100:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for _ in range(300):
            crowd.append(socket.create_connection((where.hostname, where.port), timeout=5))
        assert cached(post(server.url, "completions", body)) > 100
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        for web in crowd:
            web.close()
    another, pid = WAY | {"prompt": f"Another: {TEXT}"}, server.process.pid
    try:  # a turn is stored once there are descriptors again
        streamed = another | {"stream": True, "max_tokens": 64}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=streamed, timeout=60) as web:
            lines = web.iter_lines()
            next(lines)
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
            assert list(lines)[-2] == "data: [DONE]"
        time.sleep(0.5)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert cached(post(server.url, "completions", another)) > 100
        assert not server.lines("not stored")
    finally:
        assert server.stop() == 0


# -- pages of strangers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("localhost:8000", True),
        ("127.0.0.1", True),
        ("192.168.0.7:80", True),
        ("[::1]:8000", True),
        ("ckv", True),
        ("box.example", True),
        ("a.localhost", True),
        ("inner.corp.example:80", True),
        ("corp.example", True),
        ("Named.Example.", True),
        ("", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("notcorp.example", False),
    ],
)
def test_which_hosts_are_answered(host: str, answered: bool) -> None:
    allowed = (".corp.example", "named.example")
    assert is_allowed(host.lower(), {"box.example"}, allowed) == answered


def test_a_name_of_strangers_is_refused_where_no_key_is_needed(engine: Engine) -> None:
    evil = {"host": "evil.example"}
    with serving(engine, Tenants()) as url:
        refused = httpx.get(f"{url}/v1/models", headers=evil)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
        assert httpx.get(f"{url}/v1/models").status_code == 200
    with serving(engine, allowed_hosts=("evil.example",)) as url:
        assert httpx.get(f"{url}/v1/models", headers=evil).status_code == 200
    with serving(engine, Tenants(TENANTS)) as url:
        assert httpx.get(f"{url}/v1/models", headers=evil | ALICE).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers=evil).status_code == 401


def test_browsers_may_read_answers_for_origins_that_are_named(engine: Engine) -> None:
    origin = {"origin": "https://app.example"}
    asks = origin | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with serving(engine, Tenants(TENANTS), cors_origins=("https://app.example",)) as url:
        asked = httpx.options(f"{url}/v1/chat/completions", headers=asks)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for headers, status in ((origin, 401), (origin | ALICE, 200)):
            answer = httpx.get(f"{url}/v1/models", headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = httpx.get(f"{url}/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
    with serving(engine) as url:
        assert (
            "access-control-allow-origin" not in httpx.get(f"{url}/health", headers=origin).headers
        )


# -- the end ---------------------------------------------------------------------------------------


def test_streams_end_with_a_last_event_at_sigterm(checkpoint: Path, tmp_path: Path) -> None:
    server = Served(checkpoint, tmp_path / "kv", "--drain-time", 0.5)
    post(server.url, "chat/completions", chat("Hello"))
    body = chat("Count.", max_tokens=8000, stream=True)
    told: dict[str, object] = {}

    def put() -> None:
        try:
            told["put"] = post(server.url, "prefixes", {"tokens": [7] * 8000}).status_code
        except httpx.HTTPError as error:
            told["put"] = error

    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        ingest = threading.Thread(target=put)
        ingest.start()
        time.sleep(0.3)
        server.process.terminate()
        rest = [line for line in lines if line.startswith("data: ")]
    ingest.join()
    assert server.process.wait(20) == 0
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["ckv"]["ended_by"] == "cancelled"
    assert told["put"] in (201, 503)
    log = server.log.read_text()
    assert "Traceback" not in log and "exception" not in log
