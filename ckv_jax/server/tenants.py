"""Tenants: API keys and salts, limits on running requests, and fair scheduling of long work."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import secrets
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from ckv_jax.server.http import ApiError, draining, invalid
from ckv_jax.storage import chain

_FIELDS = {"keys", "salt", "max_requests", "max_bytes"}
_FEWEST_CHARACTERS = 8
_FIRST_GUESS_S = 1.0
_LATEST_WEIGHT = 0.2  # of the latest request, in the mean duration that Retry-After gives
T = TypeVar("T")
INGEST_THREADS = 4
"""Ingests that write to the store at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One owner of prefixes, which no other tenant can see."""

    name: str
    """Name in logs and counters."""
    salt: str = field(default="", repr=False)
    """Separates its prefixes from those of others; no client ever names it."""
    max_requests: int | None = None
    """Generations running at once; None: the share that the server gives."""
    max_bytes: int | None = None
    """Bytes of the store; None: as many as the store has."""


DEFAULT_TENANT = Tenant(name="default")


class Tenants:
    """All tenants of one server. Without keys, every request belongs to `DEFAULT_TENANT`."""

    def __init__(self, keys: dict[str, Tenant] | None = None) -> None:
        """`keys`: tenants by API key."""
        self.open = keys is None
        """Whether no request needs a key."""
        self._by_digest = {_digest(key): tenant for key, tenant in (keys or {}).items()}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a TOML file with one table per tenant: `keys`, and optionally `salt`,
        `max_requests`, `max_bytes`.

        Tenants without a salt get a random one, which is kept in a file beside this one.
        Raises `ValueError`, which repeats no key, for any other content.
        """
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"the key file {path} is not valid TOML: {error}") from None
        keys: dict[str, Tenant] = {}
        salts: set[str] = set()
        unsalted = [n for n, t in tables.items() if isinstance(t, dict) and "salt" not in t]
        made = _salts_beside(path, unsalted) if unsalted else {}
        for name, table in tables.items():
            try:
                tenant, its_keys = _tenant(name, table, made.get(name, ""))
            except ValueError as error:
                raise ValueError(f"the key file {path}, [{name}]: {error}") from None
            if tenant.salt in salts or not keys.keys().isdisjoint(its_keys):
                raise ValueError(
                    f"the key file {path}, [{name}]: got a salt or key of another tenant, expected "
                    "unique ones"
                )
            salts.add(tenant.salt)
            keys.update(dict.fromkeys(its_keys, tenant))
        if not keys:
            raise ValueError(f"the key file {path} has no tenants, expected a table for each")
        return cls(keys)

    def of(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of a request, by its `Authorization` header, or by `X-Api-Key`, which
        Anthropic's clients send. Raises `ApiError` 401."""
        if self.open:
            return DEFAULT_TENANT
        given = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}")
        scheme, _, key = given.partition(" ")
        tenant = self._by_digest.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise ApiError(401, "the API key is missing or unknown", code="invalid_api_key")
        return tenant

    def all(self) -> list[Tenant]:
        """Every tenant once."""
        return [DEFAULT_TENANT] if self.open else list(dict.fromkeys(self._by_digest.values()))

    def share(self, whole: int) -> int:
        """Returns one tenant's share of `whole`: half of it if there are others, at least 1."""
        return max(1, whole // 2) if len(self.all()) > 1 else whole


class RequestLimiter:
    """Counts running generations and refuses those above a limit. Used in one event loop."""

    def __init__(self, max_requests: int, share: int) -> None:
        """`share`: of one tenant, unless it has a limit of its own."""
        self._max = max_requests
        self._share = share
        self._by_tenant: Counter[str] = Counter()
        self._usual_s = _FIRST_GUESS_S
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False
        """Whether every request is refused: the server is shutting down."""

    @property
    def under_way(self) -> int:
        """Generations in progress, of all tenants."""
        return self._by_tenant.total()

    @contextmanager
    def admit(self, tenant: Tenant, generations: int) -> Iterator[None]:
        """Counts `generations` as in progress within the context.

        Raises `ApiError`: 503 once the server is shutting down, 429 where a limit is reached, 400
        for more than a limit.
        """
        if self.closed:
            raise draining()
        full = self.under_way + generations > self._max
        most = self._share if tenant.max_requests is None else tenant.max_requests
        most = min(self._max, most)
        if generations > most:
            message = f"got {generations} generations (prompts times n), expected at most {most}"
            raise invalid(message, param="n")
        if full or self._by_tenant[tenant.name] + generations > most:
            message = "the server is busy" if full else "this key has too many requests in progress"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_s=self._usual_s)
        began = time.monotonic()
        self._by_tenant[tenant.name] += generations
        self._idle.clear()
        try:
            yield
        finally:
            self._by_tenant[tenant.name] -= generations
            if not self.under_way:
                self._idle.set()
            self._usual_s += _LATEST_WEIGHT * (time.monotonic() - began - self._usual_s)

    async def idle(self) -> None:
        """Returns once no generation is in progress."""
        await self._idle.wait()


def _digest(key: str) -> bytes:
    """Keys are looked up by digest, so that the time of a lookup reveals nothing about them."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _salts_beside(path: Path, names: list[str]) -> dict[str, str]:
    """The salts of tenants that have none of their own: from a file beside the key file, to which
    new ones are added. Raises `ValueError` if it cannot be read or written."""
    beside = path.with_name(f"{path.name}.salts")
    try:
        known = _salts_in(beside)
        if not known.keys() >= set(names):
            with path.with_name(f"{path.name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = {name: secrets.token_hex(32) for name in names} | _salts_in(beside)
                chain.write_json(beside, known)
    except OSError as error:
        raise ValueError(
            f"{beside} cannot be written ({error.strerror}); it keeps the salts of tenants "
            "without one. Give each tenant a salt in the key file"
        ) from error
    except ValueError as error:
        raise ValueError(f"{beside} is not a file of salts: {error}") from None
    return {name: known[name] for name in names}


def _salts_in(file: Path) -> dict[str, str]:
    """The salts in a file; none if there is no file."""
    known = json.loads(file.read_text() or "{}") if file.exists() else {}
    if not isinstance(known, dict) or not all(isinstance(s, str) for s in known.values()):
        raise ValueError("expected an object of strings")
    return dict(known)


def _tenant(name: str, table: Any, salt: str) -> tuple[Tenant, list[str]]:
    if not isinstance(table, dict):
        raise ValueError("expected a table")
    if unknown := sorted(table.keys() - _FIELDS):
        raise ValueError(f"got {', '.join(unknown)}, expected {', '.join(sorted(_FIELDS))}")
    keys = table.get("keys")
    strings = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not keys or not strings or any(len(key.strip()) < _FEWEST_CHARACTERS for key in keys):
        raise ValueError(f"keys: expected strings of at least {_FEWEST_CHARACTERS} characters")
    for bound in ("max_requests", "max_bytes"):
        value = table.get(bound)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{bound}: got {value!r}, expected a whole number, at least 1")
    tenant = Tenant(
        name=name,
        salt=chain.check_salt(table.get("salt", salt)),
        max_requests=table.get("max_requests"),
        max_bytes=table.get("max_bytes"),
    )
    return tenant, [key.strip() for key in keys]


# -- long work in turn -----------------------------------------------------------------------------


class FairPool:
    """Runs long work, such as ingests, in threads of its own. Used in one event loop.

    The work of one tenant goes in the order in which it came: at most `share` of it runs or waits
    for a thread at once. A free thread goes to what has waited for one longest, of all tenants.

    Args:
        name: of its threads.
        threads: what runs at once.
        share: what one tenant may have running or waiting for a thread at once.
    """

    def __init__(self, name: str, threads: int, share: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = asyncio.Semaphore(threads)
        self._shares = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(share))

    async def run(self, tenant: Tenant, work: Callable[[threading.Event], T]) -> T:
        """The result of `work(given_up)` in a thread, once it is the tenant's turn.

        A task that is cancelled sets `given_up`, which the work ends by.
        """
        given_up = threading.Event()
        with contextlib.ExitStack() as turn:
            for limit in (self._shares[tenant.name], self._threads):
                await limit.acquire()
                turn.callback(limit.release)
            # Submitted only once a thread is free: work that waits in the pool keeps its body
            # after it was cancelled.
            future = self._pool.submit(work, given_up)
            after(future, turn.pop_all().close, asyncio.get_running_loop())
        try:
            return await asyncio.wrap_future(future)
        finally:
            given_up.set()

    def close(self) -> None:
        """Ends the threads once what they do is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def after(future: Future[Any], call: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Calls `call` in `loop` once `future` has ended. Any thread."""

    def soon(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call)

    future.add_done_callback(soon)
