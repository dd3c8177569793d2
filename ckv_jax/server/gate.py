"""Who may come in: texts under way are counted, of everybody and of each tenant."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ckv_jax.server.errors import ApiError, draining
from ckv_jax.server.tenants import Tenant

_FIRST_GUESS_S = 1.0
_SHARE = 0.2  # of the latest request in the average that Retry-After goes by


class Gate:
    """Counts, refuses, and knows when nobody is left. Used in one event loop."""

    def __init__(self, max_requests: int) -> None:
        self._max = max_requests
        self._inside: Counter[str] = Counter()
        self._usual_s = _FIRST_GUESS_S
        self._empty = asyncio.Event()
        self._empty.set()
        self.closed = False
        """Whether everybody is refused: the server has been told to stop."""

    @property
    def inside(self) -> int:
        """Texts under way."""
        return self._inside.total()

    @contextmanager
    def enter(self, tenant: Tenant, texts: int) -> Iterator[None]:
        """Lets `texts` in for as long as the context lasts.

        Raises `ApiError`: 503 once the server is stopping, 429 where there is no room.
        """
        if self.closed:
            raise draining()
        full = self.inside + texts > self._max
        most = tenant.max_requests
        if full or (most is not None and self._inside[tenant.name] + texts > most):
            whose = "the server is busy" if full else "this key has too many requests under way"
            raise ApiError(429, whose, code="rate_limit_exceeded", retry_s=self._usual_s)
        began = time.monotonic()
        self._inside[tenant.name] += texts
        self._empty.clear()
        try:
            yield
        finally:
            self._inside[tenant.name] -= texts
            if not self._inside[tenant.name]:
                del self._inside[tenant.name]
            if not self._inside:
                self._empty.set()
            self._usual_s += _SHARE * (time.monotonic() - began - self._usual_s)

    def close(self) -> None:
        """Nobody comes in any more."""
        self.closed = True

    async def empty(self) -> None:
        """Returns once nobody is inside."""
        await self._empty.wait()
