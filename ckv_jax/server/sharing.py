"""Requests that share a beginning wait for the first one to compute it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from starlette.concurrency import run_in_threadpool

from ckv_jax.server.schema import ParsedRequest
from ckv_jax.storage.prefix import Prefix

_LONGEST_WRITE_S = 10.0
"""For which a request waits for others' KV to be written: then it computes its own."""


class Prompt:
    """Tokens that are being computed or written for one tenant."""

    def __init__(self, salt: str, tokens: np.ndarray) -> None:
        self.salt = salt
        self.tokens = tokens
        self.computed = asyncio.Event()
        self.stored = asyncio.Event()
        """Set once there is more in the store, or there will not be."""
        self._wanted = False
        self._share: Callable[[], None] | None = None

    def want(self) -> None:
        """Somebody waits for it: its KV is written while its text goes on."""
        self._wanted = True
        self._shared()

    def can_share(self, share: Callable[[], None]) -> None:
        """`share` has its KV written soon; it is called once if somebody waits."""
        self._share = share
        self._shared()

    def _shared(self) -> None:
        if self._wanted and self._share is not None:
            share, self._share = self._share, None
            share()


class Sharing:
    """The prompts under way of one application. Used in one event loop.

    Args:
        least: tokens for which it is worth waiting.
        lookup: the stored part of tokens int32 [T] of a tenant's salt.
    """

    def __init__(self, least: int, lookup: Callable[[np.ndarray, str], Prefix]) -> None:
        self._least = least
        self._lookup = lookup
        self._prompts: list[Prompt] = []

    async def wait(self, request: ParsedRequest) -> ParsedRequest:
        """The request with all that others compute or write for its prompts, once that is stored.

        Waits only where that is more than what is stored already, and not for long after it has
        been computed.
        """
        if request.documents:
            return request  # nothing of it is stored
        began, salt = time.monotonic(), request.tenant.salt
        prompts = list(request.prompts)
        waited = False
        for i in range(len(prompts)):
            tried: set[Prompt] = set()
            while other := self._best(prompts[i].tokens, prompts[i].prefix, salt, tried):
                waited = True
                tried.add(other)
                other.want()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(began + request.request_s - time.monotonic()):
                        await other.computed.wait()
                    async with asyncio.timeout(_LONGEST_WRITE_S):
                        await other.stored.wait()
                found = await run_in_threadpool(self._lookup, prompts[i].tokens[:-1], salt)
                prompts[i] = replace(prompts[i], prefix=found)
        if not waited:
            return request
        return replace(request, prompts=prompts, waited_ms=1e3 * (time.monotonic() - began))

    @contextmanager
    def computing(self, salt: str, tokens: np.ndarray) -> Iterator[Prompt]:
        """A prompt int32 [T] that is being computed, and will be stored, within the context."""
        prompt = Prompt(salt, tokens)
        self._prompts.append(prompt)
        try:
            yield prompt
        finally:
            self._end(prompt)

    def writing(self, salt: str, tokens: np.ndarray, written: Future[None]) -> None:
        """A turn int32 [T] waits to be written, until `written` ends."""
        prompt = Prompt(salt, tokens)
        prompt.computed.set()
        self._prompts.append(prompt)
        after(written, lambda: self._end(prompt), asyncio.get_running_loop())

    def _end(self, prompt: Prompt) -> None:
        self._prompts.remove(prompt)
        prompt.computed.set()
        prompt.stored.set()

    def _best(
        self, tokens: np.ndarray, stored: Prefix, salt: str, tried: set[Prompt]
    ) -> Prompt | None:
        """The prompt under way that has most of `tokens` that is not stored; None: none has."""
        size = stored.layout.chunk_tokens
        best, most = None, stored.num_tokens + self._least - 1
        for prompt in self._prompts:
            if prompt.salt == salt and prompt not in tried:
                common = same_tokens(prompt.tokens, tokens[:-1]) // size * size
                if common > most:
                    best, most = prompt, common
        return best


def same_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """With how many tokens both begin."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def after(future: Future[None], call: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Calls `call` in `loop` once `future` has ended. Any thread."""

    def soon(_: Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call)

    future.add_done_callback(soon)
