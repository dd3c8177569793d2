"""What requests over one prefix have in common: a key that says which replica is warm for them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_MOST = 4096  # characters, or token ids, that the key is made of


def beginning(body: bytes) -> str:
    """A digest of how a request's prompt begins, hexadecimal: of a chat, or of a prefix to be
    stored for it, its first message, whatever follows; of other prompts, the beginning of the
    (first) text. Bodies that make no sense have a key, too: a replica says what is wrong."""
    try:
        asked = json.loads(body)
        text = next(
            (
                _text(asked[name])
                for name in ("messages", "prompt", "text", "tokens")
                if name in asked
            ),
            "",
        )
    except (ValueError, TypeError, RecursionError):
        text = ""
    return hashlib.sha256(text[:_MOST].encode("utf-8", "surrogatepass")).hexdigest()


def _text(value: Any) -> str:
    """The first text there is in messages, parts of a message, prompts, or token ids."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        return ",".join(map(str, value[:_MOST]))
    if isinstance(value, list):
        return _text(value[0]) if value else ""
    if isinstance(value, dict):
        return _text(value.get("content", value.get("text", "")))
    return value if isinstance(value, str) else ""
