"""The two files of `ckv batch`: request lines in, result lines out, resumable between them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from ckv_jax.cli.output import json_line
from ckv_jax.config import check_budget
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.validate import check_text

__all__ = ["BadLine", "Job", "Results", "read_jobs"]

_SAMPLING = {field.name for field in fields(SamplingParams)}
_START = b'{"line": '  # of every result
_KNOWN = {"id", "prefix", "question", "prompt", "budget"} | _SAMPLING


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request line that can be asked."""

    line: int
    digest: str
    """Identifies the line by its content, so that a line that was edited is asked again."""
    id: str
    prefix: str | None
    """What the stored text is called; None: the question is a whole prompt."""
    question: str | tuple[int, ...]
    budget: float | str | None
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """One request line that cannot be asked, and why."""

    line: int
    digest: str
    id: str | None
    error: str


def read_jobs(path: Path, *, prefix: str | None = None) -> Iterator[Job | BadLine]:
    """The lines of a JSONL file, blank ones left out; `prefix` serves lines that name none."""
    seen: dict[str, int] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            digest = hashlib.sha256(raw.strip()).hexdigest()[:16]
            name: str | None = None
            try:
                values = _object(raw)
                name = _identifier(values, number)
                if name in seen:
                    raise ValueError(f"got id {name!r}, which line {seen[name]} has already")
                seen[name] = number
                yield _job(values, line=number, digest=digest, id=name, prefix=prefix)
            except (TypeError, ValueError) as error:
                yield BadLine(line=number, digest=digest, id=name, error=str(error))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.strip())
        check_text(json.dumps(values, ensure_ascii=False))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("not a request: nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError(f"got {type(values).__name__}, expected an object")
    return values


def _identifier(values: Mapping[str, Any], number: int) -> str:
    name = values.get("id", str(number))
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError(f"got id={name!r}, expected a string or a whole number")
    return str(name)


def _job(values: Mapping[str, Any], *, line: int, digest: str, id: str, prefix: str | None) -> Job:
    unknown = sorted(values.keys() - _KNOWN)
    if unknown:
        raise ValueError(
            f"got unknown field {', '.join(unknown)}, expected {', '.join(sorted(_KNOWN))}"
        )
    whole = "prompt" in values
    named = None if whole else values.get("prefix", prefix)
    if whole and (both := sorted({"prefix", "question"} & values.keys())):
        raise ValueError(f"got a prompt and a {both[0]}, expected the prompt alone")
    if not whole and (not isinstance(named, str) or not named):
        raise ValueError("got no prefix, expected the id of a stored one (or --prefix)")
    asked = "prompt" if whole else "question"
    budget = values.get("budget")
    return Job(
        line=line,
        digest=digest,
        id=id,
        prefix=named,
        question=_text(asked, values.get(asked)),
        budget=None if budget is None else check_budget(budget),
        sampling=_sampling(values),
    )


def _text(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise ValueError(f"got {name}={value!r}, expected a text or a list of token ids, not empty")


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    given = {name: values[name] for name in _SAMPLING & values.keys()}
    for name in given.keys() & {"stop", "stop_token_ids"}:
        value = [given[name]] if isinstance(given[name], str) else given[name]
        if not isinstance(value, list):
            raise ValueError(f"got {name}={value!r}, expected a list")
        given[name] = tuple(value)
    return SamplingParams(**({"max_tokens": 1} | given))


class Results:
    """The result file: one JSON object per line, appended and flushed one by one.

    Answers that are there already are kept. A last line that a kill cut in half is removed at
    open, and so are errors: those requests are tried again. Raises `ValueError` for a file of
    anything else, and leaves it as it is.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[tuple[int, str]] = set()
        """(line, digest) of every request that has its answer here."""
        if path.exists():
            self._resume(path)
        self._file = path.open("ab")

    def _resume(self, path: Path) -> None:
        before = path.read_bytes()
        kept = []
        for raw in before.splitlines(keepends=True):
            if not raw.endswith(b"\n") and raw[: len(_START)] == _START[: len(raw)]:
                break
            try:
                value = json.loads(raw)
                key = (int(value["line"]), str(value["digest"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} holds something else than results of ckv batch; name another --out"
                ) from error
            if "error" not in value:
                self.done.add(key)
                kept.append(raw)
        after = b"".join(kept)
        if after != before:
            partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            partial.write_bytes(after)
            partial.replace(path)

    def write(self, value: Mapping[str, Any]) -> None:
        """Append one result; it survives a kill of this process from here on."""
        self._file.write(json_line(value).encode())
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
