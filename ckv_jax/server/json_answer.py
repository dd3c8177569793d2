"""JSON as it goes out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


def encode(value: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON in one line; half characters stand as escapes, which JSON has for them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class JsonAnswer(Response):
    """One JSON object."""

    media_type = "application/json"

    def __init__(
        self,
        value: Mapping[str, Any],
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(encode(value), status_code=status, headers=headers)
