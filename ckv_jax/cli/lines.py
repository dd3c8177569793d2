"""Request lines of `ckv batch`, their order, their answers, and the result file."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from ckv_jax.answer import answer_json, room
from ckv_jax.cli.options import generates
from ckv_jax.cli.output import json_line, one_line
from ckv_jax.config import check_budget
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError, check_text
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Generation, Request, Result
from ckv_jax.storage.chain import common_length
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.tools.inspect import find_prefix
from ckv_jax.user_cache import partial_of

MIN_SHARED = 256
"""Tokens of the shortest shared prefix that is stored: computing fewer again costs no more than
reading them."""
MOST_IN_ROW = 8
"""Batches over one prefix in a row, before the line that has waited longest selects the prefix."""

_SAMPLING = {field.name for field in fields(SamplingParams)}
_START = b'{"line": '  # of every result
_KNOWN = {"id", "prefix", "question", "prompt", "budget"} | _SAMPLING


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """One valid request line."""

    line: int
    digest: str
    """Identifies the line by its content, so that an edited line is answered again."""
    id: str
    prefix: str | None
    """Id or name of the stored prefix; None if `question` is a whole prompt."""
    question: str | tuple[int, ...]
    budget: float | str | None
    sampling: SamplingParams
    bounded: bool = True
    """Whether the line has `max_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """One invalid request line, and its error."""

    line: int
    digest: str
    id: str | None
    error: str


def read_lines(path: Path, *, prefix: str | None = None) -> Iterator[RequestLine | BadLine]:
    """Reads the non-blank lines of a JSONL file; `prefix` is the default of their prefix."""
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
                    raise ValueError(f"got id {name!r} of line {seen[name]}, expected a unique id")
                seen[name] = number
                yield _request_line(values, line=number, digest=digest, id=name, prefix=prefix)
            except (TypeError, ValueError) as error:
                yield BadLine(line=number, digest=digest, id=name, error=str(error))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.strip())
        check_text(json.dumps(values, ensure_ascii=False))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"expected a JSON object: {error}") from error
    except RecursionError as error:
        raise ValueError("got JSON that is nested too deeply, expected an object") from error
    if not isinstance(values, dict):
        raise ValueError(f"got {type(values).__name__}, expected an object")
    return values


def _identifier(values: Mapping[str, Any], number: int) -> str:
    name = values.get("id", str(number))
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        raise ValueError(f"got id={name!r}, expected a string or an integer")
    return str(name)


def _request_line(
    values: Mapping[str, Any], *, line: int, digest: str, id: str, prefix: str | None
) -> RequestLine:
    unknown = sorted(values.keys() - _KNOWN)
    if unknown:
        raise ValueError(
            f"got unknown field {', '.join(unknown)}, expected {', '.join(sorted(_KNOWN))}"
        )
    whole = "prompt" in values
    named = None if whole else values.get("prefix", prefix)
    if whole and (both := sorted({"prefix", "question"} & values.keys())):
        raise ValueError(f"got both prompt and {both[0]}, expected only prompt")
    if not whole and (not isinstance(named, str) or not named):
        raise ValueError("got no prefix, expected the id or name of a stored one, or --prefix")
    field = "prompt" if whole else "question"
    budget = values.get("budget")
    return RequestLine(
        line=line,
        digest=digest,
        id=id,
        prefix=named,
        question=_text(field, values.get(field)),
        budget=None if budget is None else check_budget(budget),
        sampling=_sampling(values),
        bounded="max_tokens" in values,
    )


def _text(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise ValueError(f"got {name}={value!r}, expected a non-empty text or list of token ids")


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    given = {name: values[name] for name in _SAMPLING & values.keys()}
    for name in given.keys() & {"stop", "stop_token_ids"}:
        value = [given[name]] if isinstance(given[name], str) else given[name]
        if not isinstance(value, list):
            raise ValueError(f"got {name}={value!r}, expected a list")
        given[name] = tuple(value)
    return SamplingParams(**({"max_tokens": 1} | given))


class Results:
    """The result file of `ckv batch`: one JSON object per line, each appended and flushed at once.

    Opening it keeps the answers of an earlier run. It removes errors and an incomplete last line,
    so that those requests are answered again. Raises `ValueError` for a file that has anything
    else, without changing it.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[tuple[int, str]] = set()
        """(line, digest) of every request that has an answer in the file."""
        if path.is_file():  # not a pipe
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
                    f"{path} is not a result file of `ckv batch`; name another file with --out"
                ) from error
            if "error" not in value:
                self.done.add(key)
                kept.append(raw)
        after = b"".join(kept)
        if after != before:
            partial = partial_of(path)
            partial.write_bytes(after)
            partial.replace(path)

    def write(self, value: Mapping[str, Any]) -> None:
        """Appends one result and flushes it, so that it survives a kill of the process."""
        self._file.write(json_line(value).encode())
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def batches(
    lines: Sequence[RequestLine], size: int, *, prefix_of: Callable[[RequestLine], Hashable]
) -> Iterator[list[RequestLine]]:
    """Orders lines into batches of `size` (the last one may be smaller), prefix by prefix.

    The chunks that one batch has read stay in memory for the next batch over the same prefix. A
    line waits for at most `MOST_IN_ROW` batches of each prefix named before it.
    """
    waiting: dict[Hashable, deque[RequestLine]] = {}
    for line in lines:
        waiting.setdefault(prefix_of(line), deque()).append(line)
    order: list[RequestLine] = []
    while waiting:
        prefix = min(waiting, key=lambda name: waiting[name][0].line)
        queue = waiting[prefix]
        order += [queue.popleft() for _ in range(min(len(queue), MOST_IN_ROW * size))]
        if not queue:
            del waiting[prefix]
    yield from (order[first : first + size] for first in range(0, len(order), size))


def shared_prefixes(prompts: Sequence[np.ndarray], *, least: int = MIN_SHARED) -> list[int]:
    """Finds the longest prefix that each prompt (int32 [T]) shares with another one, in tokens.

    The length is 0 where it is shorter than `least`. It never includes a prompt's last token, so
    that at least one token is left to compute.
    """
    # In lexicographic order, no prompt shares more with another one than with its neighbours.
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">i4").tobytes())
    longest = [0] * len(prompts)
    for one, other in pairwise(order):
        common = common_length(prompts[one], prompts[other])
        for i in (one, other):
            longest[i] = max(longest[i], min(common, len(prompts[i]) - 1))
    return [count if count >= least else 0 for count in longest]


class Answerer:
    """Answers request lines with one engine; an error of one does not affect the others."""

    def __init__(self, engine: Engine, *, model: str) -> None:
        self._engine = engine
        self._model = model
        self._prefixes: dict[str, Prefix] = {}
        self._prompts: dict[int, tuple[Prefix | None, np.ndarray]] = {}

    def store_shared_prefixes(
        self, lines: Sequence[RequestLine], progress: Callable[[int, int], object]
    ) -> dict[str, int]:
        """Stores the prefixes that prompts share; returns the number of tokens of each, by id.

        It stores the shortest first, because longer ones may continue them. `progress(done, total)`
        counts prompts. A prompt that cannot be stored stays whole; its answer has the error.
        """
        whole: dict[int, np.ndarray] = {}
        for line in lines:
            if line.prefix is None:
                with contextlib.suppress(CkvError, ValueError):
                    whole[line.line] = self._engine.encode(line.question, begins=True)
        lengths = shared_prefixes(list(whole.values()))
        found: dict[bytes, Prefix | None] = {b"": None}
        stored: dict[str, int] = {}
        order = sorted(zip(lengths, whole.items(), strict=True), key=lambda entry: entry[0])
        for number, (length, (at, tokens)) in enumerate(order, start=1):
            shared = tokens[:length].tobytes()
            if shared not in found:
                try:
                    found[shared] = self._engine.ingest(tokens[:length])
                except (CkvError, ValueError):
                    found[shared] = None
            prefix = found[shared]
            if prefix is not None:
                stored[prefix.id] = prefix.num_tokens
            self._prompts[at] = prefix, tokens[0 if prefix is None else length :]
            progress(number, len(order))
        return stored

    def prefix_of(self, line: RequestLine) -> Hashable:
        """Returns the key by which `batches` groups a line: its prefix, or else its number."""
        if line.prefix is not None:
            return line.prefix
        prefix, _ = self._prompts.get(line.line, (None, None))
        return line.line if prefix is None else prefix.id

    def answer(
        self, lines: Sequence[RequestLine]
    ) -> Iterator[tuple[RequestLine, dict[str, Any] | str]]:
        """Yields each line with its answer as JSON, or with its error."""
        ready: list[tuple[RequestLine, Request, SamplingParams]] = []
        for line in lines:
            try:
                ready.append((line, *self._request(line)))
            except (CkvError, ValueError) as error:
                yield line, one_line(error)
        if not ready:
            return
        for decode in (False, True):
            part = [one for one in ready if _needs_decode(one[2]) == decode]
            outcomes = self._outcomes([one[1:] for one in part], decode)
            yield from zip([line for line, *_ in part], outcomes, strict=True)

    def _outcomes(
        self, part: Sequence[tuple[Request, SamplingParams]], decode: bool
    ) -> Iterator[dict[str, Any] | str]:
        if not part:
            return
        requests = [request for request, _ in part]
        found: list[Result | Generation] = []
        if decode:
            found += self._engine.generate(requests, [sampling for _, sampling in part]).results()
        else:
            found += self._engine.reprefill(requests)
        for outcome, request in zip(found, requests, strict=True):
            prefix = request.prefix
            prefixes = (prefix,) if isinstance(prefix, Prefix) else ()
            try:
                yield answer_json(outcome, self._engine, *prefixes, model=self._model)
            except (CkvError, ValueError) as error:
                yield one_line(error)

    def _request(self, line: RequestLine) -> tuple[Request, SamplingParams]:
        if line.prefix is None:
            return self._prompt_request(line), line.sampling
        engine, sampling = self._engine, line.sampling
        if line.prefix not in self._prefixes:
            prefix = find_prefix(engine.store, line.prefix, salt=engine.config.salt)
            self._prefixes[line.prefix] = prefix
        prefix = self._prefixes[line.prefix]
        suffix = line.question
        if isinstance(suffix, str):
            suffix = tuple(engine.question(prefix, suffix).tolist())
            if not line.bounded and generates(engine.system) and engine.is_document(prefix):
                limit = engine.model_config.max_position_embeddings
                most = room(prefix.num_tokens, len(suffix), limit)
                sampling = replace(sampling, max_tokens=most)
        return Request(prefix=prefix, suffix=suffix, budget=line.budget, id=line.id), sampling

    def _prompt_request(self, line: RequestLine) -> Request:
        """Builds the request of a whole prompt: a stored shared prefix, and a suffix to compute."""
        if line.line not in self._prompts:
            self._engine.encode(line.question, begins=True)  # raises its error
        prefix, rest = self._prompts[line.line]
        stored: Prefix | list[int] = [] if prefix is None else prefix
        return Request(prefix=stored, suffix=rest.tolist(), budget=line.budget, id=line.id)


def _needs_decode(sampling: SamplingParams) -> bool:
    """Whether a line needs more than the greedy first token, all that baselines compute."""
    return sampling.max_tokens > 1 or sampling.temperature > 0
