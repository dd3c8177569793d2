"""Request bodies: reads them within limits, measures them before parsing, parses off the loop.

A body that cannot be served costs its bytes, a pass over them, and nothing else: values, nesting,
lists and texts are counted in the bytes, before one Python object is made of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from ckv_jax.server.http import ApiError, invalid

Model = TypeVar("Model", bound=BaseModel)

_SMALL = 64 << 10
"""Bytes of a body that neither waits for larger ones nor counts among those held at once."""
_LITTLE = 32 << 10
"""Bytes of a body of few lists and objects that takes less time to parse than to hand to a
thread."""
_HELD = 2
"""So many of the largest bodies may be held at once."""
_DEEPEST = 64
_KEY_SIZE = 4096  # characters, or token ids, that a prefix key is made of
_LONGEST_NUMBER = 64
_MOST_VALUES = 1 << 20
_MORE_VALUES = 20_000  # besides tokens and messages: schemas of tools, metadata
_MORE_BYTES = 64 << 10  # besides the texts themselves: roles, names, ids of calls
_RUN = 1 << 16  # bytes of one step: no step keeps other threads waiting
_PROMPTS = frozenset(
    ("document", "input", "instructions", "messages", "prompt", "system", "text", "tokens")
)
_TOKEN = re.compile(
    rb"[ \t\r\n]{1,%d}" % _RUN
    + rb'|(")|([\[{])|([\]}])|(,)|:'
    + rb'|([^ \t\r\n"\[\]{},:]{1,%d})' % _LONGEST_NUMBER
)
_LONG_NUMBER = re.compile(rb"[0-9eE.+-]{%d}" % _LONGEST_NUMBER)
_STRING = re.compile(rb'(?:[^"\\]{1,%d}+|\\.){1,4096}+' % _RUN, re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one request body."""

    max_bytes: int
    items: int = _MOST_VALUES
    """Maximum items of one list or object: the tokens of a context."""
    text_bytes: int | None = None
    """UTF-8 bytes of one prompt: more are more tokens than a context has. None: unknown."""
    prompts: int = 1
    """Of one request."""

    @property
    def values(self) -> int:
        """JSON values of a whole body."""
        return min(_MOST_VALUES, self.items * self.prompts + _MORE_VALUES)


class Bodies:
    """Reads and parses the bodies of one application. Used in one event loop.

    Args:
        limits: of each body.
        seconds: in which a body has to arrive.
        share: of the bytes held at once that one tenant may have.
    """

    def __init__(self, limits: Limits, seconds: float, share: float) -> None:
        self._limits = limits
        self._seconds = seconds
        self._most = _HELD * limits.max_bytes
        self._share = int(share * self._most)
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._small = ThreadPoolExecutor(2, thread_name_prefix="ckv-body")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="ckv-large-body")

    async def parse(
        self, http: Request, model: type[Model], tenant: str, *, prompts: int = 1
    ) -> Model:
        """The body of a tenant's request with so many prompts at most, as `model`. Raises
        `ApiError`."""
        limits = replace(self._limits, prompts=prompts)
        async with self.read(http, tenant) as body:
            if len(body) <= _LITTLE and _small(body, limits):
                return parse_body(body, model, limits)
            pool = self._small if len(body) <= _SMALL else self._large
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, parse_body, body, model, limits)

    def close(self) -> None:
        """Ends the threads."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def read(self, http: Request, tenant: str) -> AsyncIterator[bytearray]:
        """The whole body of a tenant's request, whose bytes count as held within the context.
        Raises `ApiError`."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            more = size - held if size > _SMALL else 0
            full = self._held.total() + more > self._most
            if more and (full or self._held[tenant] + more > self._share):
                busy = "the server is reading too many large requests; try again later"
                raise ApiError(429, busy, code="rate_limit_exceeded", retry_s=1)
            self._held[tenant] += more
            held += more

        try:
            yield await read_body(
                http, max_bytes=self._limits.max_bytes, seconds=self._seconds, hold=hold
            )
        finally:
            self._held[tenant] -= held


async def read_body(
    http: Request, *, max_bytes: int, seconds: float, hold: Callable[[int], None]
) -> bytearray:
    """The whole body of a request.

    Raises `ApiError` 413 for more than `max_bytes`, 408 if it is not there after `seconds`, and
    `ClientDisconnect`. `hold` receives the bytes so far, and may refuse them.
    """
    large = ApiError(413, f"the body has more than {max_bytes} bytes", code="request_too_large")
    declared = http.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in http.stream():
                body += part
                if len(body) > max_bytes:
                    raise large
                hold(len(body))
    except TimeoutError:
        late = f"the body did not arrive within {seconds:g} s"
        raise ApiError(408, late, code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body arrived", code="left") from None
    http.state.body_read = True
    return body


def parse_body(body: bytes | bytearray, model: type[Model], limits: Limits) -> Model:
    """A body as `model`. Raises `ApiError` for the first thing that is wrong with it."""
    value = load_json(body, limits)
    if not isinstance(value, dict):
        raise invalid("got no JSON object, expected one as the body", code="missing")
    return validated(model, value)


def validated(model: type[Model], value: Any) -> Model:
    """A JSON object as `model`. Raises `ApiError` for the first thing that is wrong with it."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _of_validation(error) from None


def load_json(body: bytes | bytearray, limits: Limits) -> Any:
    """The value of a JSON text within `limits`. Raises `ApiError`."""
    if json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):  # `measure` reads ASCII bytes
        raise invalid("the body is not UTF-8", code="invalid_json")
    measure(body, limits)
    try:
        return json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        message = "the body is not valid JSON"
        if isinstance(error, json.JSONDecodeError):
            message += f": {error.msg} at character {error.pos}"
        raise invalid(message, code="invalid_json") from None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise invalid("the body has a number that is not finite", code="invalid_json")
    return value


def measure(body: bytes | bytearray, limits: Limits) -> None:
    """Raises `ApiError` for a JSON text that is larger than `limits` in any respect.

    It need not be valid beyond that.
    """
    if _small(body, limits):
        return
    at, values, size, field = 0, 0, 0, ""
    counts: list[int] = []  # items so far of each open list or object
    while (found := _TOKEN.match(body, at)) is not None:
        at, kind = found.end(), found.lastindex
        if kind is None:
            continue
        if kind == 1:
            values += 1
            end, least = _string(body, at)
            if len(counts) == 1 and body[end + 1 : end + 65].lstrip()[:1] == b":":
                field, size = body[at : min(end, at + 64)].decode("utf-8", "replace"), 0
            else:
                size += least
                most = limits.text_bytes
                if most is not None and max(least, size - _MORE_BYTES) > most:
                    _refuse_text(field, most, limits.prompts, least, size)
            at = end + 1
        elif kind == 2:
            values += 1
            counts.append(0)
            if len(counts) > _DEEPEST:
                raise _refusal(field, f"nested deeper than {_DEEPEST}")
        elif kind == 3:
            if counts:
                counts.pop()
        elif kind == 4:
            if counts:
                counts[-1] += 1
                if counts[-1] >= limits.items:
                    field = field if len(counts) > 1 else ""
                    code = "context_length_exceeded" if field in _PROMPTS else "invalid_value"
                    many = f"a list or object has more than {limits.items} items"
                    raise _refusal(field, many, code)
        else:
            values += 1
            if at - found.start() == _LONGEST_NUMBER:
                raise _refusal(field, f"a number has {_LONGEST_NUMBER} characters or more")
        if values > limits.values:
            raise _refusal(field, f"the body has more than {limits.values} values")


def _small(body: bytes | bytearray, limits: Limits) -> bool:
    """Whether counts of bytes prove that a text is within `limits`, whatever its strings hold."""
    most = len(body) if limits.text_bytes is None else limits.text_bytes
    if len(body) > min(_SMALL, most):
        return False
    commas, opened = body.count(b","), body.count(b"[") + body.count(b"{")
    values = 1 + commas + opened + body.count(b":")
    return (
        opened <= _DEEPEST
        and commas < limits.items - 1
        and values <= limits.values
        and _LONG_NUMBER.search(body) is None
    )


def _string(body: bytes | bytearray, at: int) -> tuple[int, int]:
    """(where the string that begins at `at` ends, the fewest bytes that it stands for)."""
    start = at
    while (found := _STRING.match(body, at)) is not None:
        at = found.end()
    escapes = body.count(b"\\", start, at)
    return at, max(0, at - start - 5 * escapes)


def _refuse_text(field: str, most: int, prompts: int, least: int, size: int) -> None:
    if least <= most and (field not in _PROMPTS or size - _MORE_BYTES <= most * prompts):
        return
    if field in _PROMPTS:
        held = f"more text than the {most} bytes that this model's context can hold"
        raise _refusal(field, held, "context_length_exceeded")
    raise _refusal(field, f"more text than {most} bytes")


def _refusal(field: str, reason: str, code: str = "invalid_value") -> ApiError:
    """The error for a field of the body; for the body itself without one."""
    return invalid(f"{field or 'the body'}: {reason}", param=field or None, code=code)


def _of_validation(error: ValidationError) -> ApiError:
    """The first field that is wrong; its value is not repeated."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    kind = str(first["type"])
    if kind == "extra_forbidden":
        message = f"got the unknown field {where!r}; leave it out"
        return invalid(message, param=where, code="unknown_parameter")
    if kind == "missing":
        return invalid(f"{where} is missing", param=where, code="missing")
    if kind == "value_error":
        return invalid(f"{where or 'body'}: {first['ctx']['error']}", param=where or None)
    return invalid(f"{where or 'body'}: {first['msg']}", param=where or None)


# -- keys of prefixes ------------------------------------------------------------------------------


def prefix_key(body: bytes | bytearray) -> str:
    """A hexadecimal digest of the start of a request's prompt, by which replicas are chosen.

    Of a chat, or of a prefix stored for chats, it covers the first message alone; of other
    prompts, the start of the first one. A body that goes on from a response has the key that ends
    the response's id. A body that is not valid has a key, too: a replica reports what is wrong
    with it.
    """
    text = ""
    try:
        values = load_json(body, Limits(max_bytes=len(body)))
        if isinstance(values, dict) and (earlier := values.get("previous_response_id")):
            return bytes.fromhex(str(earlier)[-64:]).hex()
        for name in ("messages", "input", "prompt", "document", "text", "tokens"):
            if name in values:
                text = _first_text(values[name])
                break
    except (ApiError, TypeError, ValueError):
        pass
    return hashlib.sha256(text[:_KEY_SIZE].encode("utf-8", "surrogatepass")).hexdigest()


def _first_text(value: Any) -> str:
    """The first text in messages, parts of a message, prompts, or token ids."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        return ",".join(map(str, value[:_KEY_SIZE]))
    if isinstance(value, list):
        return _first_text(value[0]) if value else ""
    if isinstance(value, dict):
        return _first_text(value.get("content", value.get("text", "")))
    return value if isinstance(value, str) else ""
