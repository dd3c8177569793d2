"""The documented command of replicas, on two processors; the process of one is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="replicas need the extra `ray`")

from server.serving import MODEL, metric, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1100)]

MARK = "CKV_TEST_REPLICAS"
PORT = 8000
SERVE = (sys.executable, "-m", "ray.serve.scripts")
DOCUMENT = "The keeper of the lamp walks up the stairs and counts them one by one. " * 40


def marked(mark: str, title: bytes = b"") -> set[int]:
    """Process ids of what was started under this mark, with a title that begins so."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = (folder / "cmdline").read_bytes().startswith(title)
            if named and f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


def replicas(mark: str) -> set[int]:
    """Process ids of the replicas."""
    return marked(mark, b"ray::ServeReplica:default:replica")


@pytest.fixture
def started(checkpoint: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of two replicas, and their mark."""
    mark = secrets.token_hex(8)
    try:
        socket.create_server(("127.0.0.1", PORT)).close()
    except OSError as error:
        pytest.skip(f"port {PORT}, which the command takes: {error}")
    environment = {
        **os.environ, MARK: mark, "JAX_PLATFORMS": "cpu",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300", "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',
        "RAY_ADDRESS": "local",  # not one that other tests may have left
    }  # fmt: skip
    words = (f"checkpoint={checkpoint}", f"store={tmp_path / 'kv'}", f"name={MODEL}")
    command = [*SERVE, "run", "ckv_jax.server.ray_app:build", *words]

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    process, starts = start(), 1
    url = f"http://127.0.0.1:{PORT}"

    def ready() -> bool:
        nonlocal process, starts
        if process.poll() is not None:  # Ray gives its proxy 60 s, which no setting changes
            said = (tmp_path / "log").read_text()
            assert "HTTP proxies not available" in said and starts < 3, said
            process, starts = start(), starts + 1
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/ready", timeout=5).status_code == 200
        return False

    try:
        wait_for(ready, 600)
        yield url, mark
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        for left in marked(mark):
            with contextlib.suppress(OSError):
                os.kill(left, signal.SIGKILL)
        process.wait(60)


def ask(url: str, question: str, *, stream: bool) -> str | None:
    """The answer; None where the request failed."""
    messages = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
    body = {"model": MODEL, "max_tokens": 24, "seed": 5, "stream": stream, "messages": messages}
    with contextlib.suppress(httpx.TransportError):
        found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240)
        whole = found.text.rstrip().endswith("[DONE]") if stream else True
        return found.text if found.status_code == 200 and whole else None
    return None


def test_the_documented_command_outlives_kill_9_of_a_replica(started: tuple[str, str]) -> None:
    url, mark = started
    wait_for(lambda: len(replicas(mark)) == 2, 60)
    assert ask(url, "Which lamp?", stream=False)
    first = replicas(mark)
    assert len(first) == 2
    assert len(httpx.get(f"{url}/v1/status", timeout=60).json()["replicas"]) == 2
    assert metric(url, "ckv_requests_waiting") == 0
    text = httpx.get(f"{url}/metrics", timeout=60).text
    labels = {line.partition('replica="')[2][:8] for line in text.splitlines() if line[0] != "#"}
    assert len(labels) == 2
    failed: list[str] = []
    retried: list[str] = []

    def keep_asking(which: int) -> None:
        for turn in range(4):
            question, stream = f"Which lamp? {which}", bool(turn % 2)
            if ask(url, question, stream=stream) is None:
                retried.append(question)
                if ask(url, question, stream=stream) is None:
                    failed.append(question)

    threads = [threading.Thread(target=keep_asking, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    os.kill(min(first), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert not failed, retried
    wait_for(lambda: len(replicas(mark) - {min(first)}) == 2, 120)
    assert ask(url, "Which lamp?", stream=False)
