"""The server's log: one JSON object per line on stderr, and nothing of what clients write."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Callable
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
        self.path = path[:_LONGEST_PATH]
        self.fields: dict[str, Any] = {}
        self.status = 0
        self.why: str | None = None
        """Why the answer did not reach the client."""
        self.began_ns = time.perf_counter_ns()

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
        seconds = round((time.perf_counter_ns() - self.began_ns) / 1e9, 4)
        fields = self.fields if self.why is None else self.fields | {"undelivered": self.why}
        event("request", id=self.id, path=self.path, status=self.status, seconds=seconds, **fields)

    def undelivered(self, why: str) -> None:
        """Its client is gone, or reads nothing."""
        self.why = why


class Records:
    """Gives every request its `Record` and its id, and writes the line."""

    def __init__(self, app: ASGIApp, ended: Callable[[Record], None]) -> None:
        """`ended` is told of each, too."""
        self._app = app
        self._ended = ended

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
            self._ended(record)


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
