"""Ingests of a server: a few at once in threads of their own, tenants in turn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ckv_jax.server.tenants import Tenant

T = TypeVar("T")
INGEST_THREADS = 4
"""Ingests that write to the store at once."""


class Ingests:
    """Runs ingests in threads of its own, a few at once, tenants in turn. Used in one event loop.

    Args:
        share: threads that one tenant may use at once.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self._pool = ThreadPoolExecutor(INGEST_THREADS, thread_name_prefix="ckv-ingest")
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: Tenant, ingest: Callable[[threading.Event], T]) -> T:
        """The result of `ingest(given_up)` in a thread, once it is the tenant's turn.

        A task that is cancelled sets `given_up`, which the ingest ends by.
        """
        await self._turn(tenant.name)
        given_up = threading.Event()
        try:
            work = self._pool.submit(ingest, given_up)
        except BaseException:
            self._end(tenant.name)
            raise
        loop = asyncio.get_running_loop()
        work.add_done_callback(lambda _: _soon(loop, self._end, tenant.name))
        try:
            return await asyncio.wrap_future(work)
        finally:
            given_up.set()

    def close(self) -> None:
        """Ends the threads once what they do is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, name: str) -> None:
        if self._free(name) and not self._waiting:
            self._running[name] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(name)  # it was its turn just now
            raise

    def _end(self, name: str) -> None:
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]
        self._next()

    def _free(self, name: str) -> bool:
        return self._running.total() < INGEST_THREADS and self._running[name] < self._share

    def _next(self) -> None:
        """Begins what waits and may run: one of each tenant in turn."""
        for name in list(self._waiting):
            turns = self._waiting[name]
            while turns and turns[0].done():
                turns.popleft()  # given up
            if turns and self._free(name):
                self._running[name] += 1
                turns.popleft().set_result(None)
                self._waiting.move_to_end(name)
            if not turns:
                del self._waiting[name]


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[str], None], name: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call, name)
