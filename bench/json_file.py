"""Result files: written whole or not at all, and one clear line where one is not whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["NotWhole", "read_json", "read_rows", "write_text"]


class NotWhole(SystemExit):
    """A file that should be a JSON object and is not; ends a command with one line."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises `NotWhole`, which names the file, where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # cut short, not JSON, or not text at all
        raise NotWhole(f"{path} cannot be read as a result: {error}") from error
    if not isinstance(found, dict):
        raise NotWhole(f"{path} is no result: got a {type(found).__name__}, expected an object")
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a result. Raises `NotWhole`, which names the file, where it has none."""
    rows = read_json(path).get("rows")
    if not isinstance(rows, list) or not rows:
        raise NotWhole(f"{path} is no result: it has no rows")
    return rows


def write_text(path: Path, text: str) -> None:
    """Writes a file that has all of the text or, if this is cut short, what it had before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a terminal, a pipe: nothing to be put in its place
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
