"""Applications in this process, for tests: a URL over an engine, with settings of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from opentelemetry.sdk.trace import TracerProvider
from server.serving import KEYS, MODEL, in_thread

from ckv_jax import Engine
from ckv_jax.server.app import create_app
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.tenants import Tenant, Tenants

TEXT = "The keeper of the lamp walks up the stairs and counts them one by one. " * 6
WAY = {"model": MODEL, "max_tokens": 8, "temperature": 1.0, "seed": 5}
ALICE = {"authorization": f"Bearer {KEYS['alice']}"}
BOB = {"authorization": f"Bearer {KEYS['bob']}"}
TENANTS = {key: Tenant(name=name, salt=name) for name, key in KEYS.items()}


@contextmanager
def serving(
    engine: Engine,
    tenants: Tenants | None = None,
    tracing: TracerProvider | None = None,
    **config: object,
) -> Iterator[str]:
    """The URL of an application of its own over the shared engine."""
    values = {"store_tokens": 128, "turn_tokens": 16, "guard_disk": False} | config
    made = ServerConfig(model=MODEL, **values)
    app = create_app(engine, made, tenants, tracing=tracing)
    try:
        with in_thread(app) as url:
            yield url
    finally:
        app.state.service.close()


def chat(text: str, **more: object) -> dict:
    """A body for `/v1/chat/completions`."""
    return WAY | {"messages": [{"role": "user", "content": text}]} | more


def cached(answer: httpx.Response) -> int:
    """Tokens of its prompt that came from the store."""
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
