"""Real servers for tests: `ckv serve` in a process of its own, or the application in a thread."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette

from ckv_jax.server.app import bind, url_of

KEYS = {"alice": "alice-key-1", "bob": "bob-key-1"}
MODEL = "tiny"
START_S = 120


class Served:
    """`ckv serve` as users start it. Its log goes to a file; `url` is where it answers."""

    def __init__(
        self, checkpoint: Path, store: Path, *args: object, before: tuple[str, ...] = ()
    ) -> None:
        """`before`: a command that starts the server, whose words follow it."""
        self.log = store.with_suffix(f".{time.monotonic_ns()}.jsonl")
        command = [
            *before, sys.executable, "-m", "ckv_jax.cli", "serve", checkpoint, "--store", store,
            "--port", 0, "--name", MODEL, "--dtype", "float32", *args,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdout=log,
                stderr=log,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        self.url = self._wait()

    def _wait(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for line in self.lines("serving"):
                return line["url"]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"not serving after {START_S} s: {self.log.read_text()}")

    def lines(self, event: str) -> list[dict]:
        """The log's lines about one kind of event."""
        text = self.log.read_text().splitlines()
        found = [json.loads(line) for line in text if line.startswith("{") and line.endswith("}")]
        return [line for line in found if line["event"] == event]

    def kill(self) -> None:
        """The process is gone at once."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 30) -> int:
        """Asks it to stop; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextmanager
def in_thread(app: Starlette, **more: object) -> Iterator[str]:
    """Serves `app` from a thread of this process; yields its URL. `more` of uvicorn's settings."""
    with bind("127.0.0.1", 0) as bound:
        config = uvicorn.Config(
            app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1, **more
        )  # type: ignore[arg-type]
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join()


def wait_for(happened: object, seconds: float = 60) -> None:
    """Returns once `happened()` is true."""
    deadline = time.monotonic() + seconds
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def post(url: str, path: str, body: object, **more: object) -> httpx.Response:
    """One plain request."""
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=120, **more)


def metric(url: str, name: str, **labels: str) -> float:
    """A figure as Prometheus' own parser reads it; 0 for labels that have not been met yet."""
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{url}/metrics", timeout=60).text
    known = False
    for family in text_string_to_metric_families(text):
        known |= family.name == name.removesuffix("_total")
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    assert known, f"there is no metric {name}"
    return 0.0
