"""The server's log: one JSON object a line on stderr, and nothing of what clients write."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckv_jax.server.asked import Asked

_log = logging.getLogger("ckv_jax.server")
_QUIET = frozenset(("/health", "/ready", "/metrics"))
_LONGEST_PATH = 200


def event(name: str, **fields: Any) -> None:
    """Something that happened to the server."""
    _log.info(name, extra={"fields": fields})


class Record:
    """One request's line, written when it is over; routes find it as `request.state.record`."""

    def __init__(self, path: str) -> None:
        self.id = f"req-{secrets.token_hex(8)}"
        self.fields: dict[str, Any] = {"path": path[:_LONGEST_PATH]}
        self.status = 0
        self._began = time.perf_counter()

    def asked(self, asked: Asked) -> None:
        """What it turned out to be."""
        self.fields |= {
            "model": asked.model,
            "texts": asked.texts,
            "prompt_tokens": sum(len(prompt.tokens) for prompt in asked.prompts),
            "stored_tokens": sum(prompt.prefix.num_tokens for prompt in asked.prompts),
            "budget": asked.budget,
        }

    def ended(self) -> None:
        """It is over."""
        seconds = round(time.perf_counter() - self._began, 4)
        event("request", id=self.id, status=self.status, seconds=seconds, **self.fields)


class Records:
    """Gives every request its `Record` and its id, and writes the line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        record = Record(scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", record.id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            record.ended()


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def write_to_stderr() -> None:
    """Sends the log of the server, and warnings of uvicorn, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for name, level in (("ckv_jax", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
