"""The page for people at `/`, and the figures that it shows."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from ckv_jax.server.json_answer import JsonAnswer
from ckv_jax.server.service import Service


def add_status_routes(app: FastAPI, service: Service) -> None:
    """Adds them to `app`. The page itself tells nothing; what it asks for needs a key."""
    page = files("ckv_jax.server").joinpath("status.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def status_page() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/v1/status")
    async def status(http: Request) -> Response:
        """What the engine is doing, and where the time to first token goes."""
        service.tenant(http)
        told: dict[str, Any] = {
            "texts_under_way": service.gate.inside,
            "ttft_ms": service.latest.breakdown_ms(),
            "engine": service.engine.stats().to_json(),
        }
        return JsonAnswer(told)
