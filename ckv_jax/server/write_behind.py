"""Storing of finished turns after their answers, for later requests that share their prefix."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from starlette.concurrency import run_in_threadpool

from ckv_jax.config import Budget
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.request import Generation
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.parser import ParsedRequest, Prompt
from ckv_jax.server.tenants import after
from ckv_jax.storage.chain import common_length
from ckv_jax.storage.errors import StoreUnavailable
from ckv_jax.storage.prefix import Prefix, PrefixRecord

_log = logging.getLogger("ckv_jax.server")
QueuedWork = tuple[Callable[[], object], "Future[None]"]
"""Work, and what ends after it."""
_MEASURED_TOKENS = 128  # fewer say nothing about the speed of computing or writing
_LATEST_WEIGHT = 0.3  # of the latest figure in a mean
_RETRY_S = 10.0  # for which a turn is tried again where the store cannot be used
_PAUSE_S = 0.1  # before the second try; twice as long before each further one
_RETRY_EVERY = 16  # skipped turns of which one is written, to measure the disk again
_LONGEST_WRITE_S = 10.0
"""Seconds that a request waits for others' KV to be written, before it computes its own."""


class WriteBehind:
    """Stores finished turns in a thread of its own; no answer waits for it. Thread-safe.

    A turn is stored with the KV that it was made with: nothing is computed for it. It is not
    stored, and counted in `skipped`, when it is short, approximate, not the first generation of its
    prompt, when too much waits to be written ("busy"), or when writing takes longer than computing
    ("slow_disk").
    """

    def __init__(self, engine: Engine, config: ServerConfig, share: int) -> None:
        """`share`: of `write_behind_bytes` that one tenant may hold."""
        self.cost = WriteCost()
        self.skipped: Counter[str] = Counter()
        self.stored_tokens = 0
        self.stored_turns = 0
        self.failed = 0
        self._engine = engine
        self._config = config
        self._share = share
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._repairing: set[str] = set()  # ids of prefixes, queued or running
        self._token_bytes = engine.layout.token_bytes
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._pending = 0
        self._closed = False
        self._idle = threading.Condition(self._lock)
        self._prune_at = time.monotonic() + config.prune_s
        self._thread = threading.Thread(target=self._run, name="ckv-write-behind", daemon=True)
        self._thread.start()

    @contextmanager
    def turns(self, request: ParsedRequest) -> Iterator[Turns]:
        """What `request` leaves to be written; memory for it is reserved within the context, and
        for what was submitted until it is written."""
        turns = Turns(self, request)
        try:
            yield turns
        finally:
            for num_bytes in turns.reserved:
                self.release(request.tenant.name, num_bytes)

    def reserve(self, request: ParsedRequest, prompt: Prompt, new_tokens: int) -> int:
        """Bytes for the KV of one turn, 0 if it is not to be stored."""
        documents = bool(request.documents)
        reason = self._skip_reason(prompt, new_tokens, documents=documents)
        if reason is None:
            computed = len(prompt.tokens) - prompt.prefix.num_tokens + new_tokens
            num_bytes, tenant = computed * self._token_bytes, request.tenant.name
            most = self._config.write_behind_bytes
            with self._lock:
                held = self._held.total()
                within_share = self._held[tenant] + num_bytes <= self._share
                fits = held + num_bytes <= most and within_share
                if fits or not held:  # one alone may be larger than all that may wait
                    self._held[tenant] += num_bytes
                    return num_bytes
            reason = "busy"
        self.skipped[reason] += 1
        return 0

    def release(self, tenant: str, num_bytes: int) -> None:
        """Gives reserved bytes back."""
        with self._lock:
            self._held[tenant] -= num_bytes

    def _skip_reason(self, prompt: Prompt, new_tokens: int, *, documents: bool) -> str | None:
        """Why a turn is not stored; None: it is, if there is room."""
        stored = prompt.prefix.num_tokens
        most = len(prompt.tokens) + new_tokens - stored
        if len(prompt.tokens) < self._config.store_tokens or most < self._config.turn_tokens:
            return "short"
        if documents or (stored and not Budget.of(prompt.budget).exact):
            return "approximate"
        return "slow_disk" if self._config.guard_disk and not self.cost.worth_writing() else None

    def submit(self, turns: Turns, generations: Sequence[Generation]) -> dict[int, Future[None]]:
        """Queues what one finished request leaves to be written; returns at once.

        The futures, by generation, end when its turn is written, or will not be.
        """
        writing: dict[int, Future[None]] = {}
        request = turns.request
        for index, generation in enumerate(generations):
            answer = generation.completion()
            computed = len(answer.suffix)
            self.cost.computed(computed, generation.trace.ttft_ms / 1e3)
            if generation.trace.of(answer.prefix.id, "recomputed_chunks"):
                self._repair(answer.prefix)
            if answer.kv is None:
                continue
            if computed + len(answer.token_ids) < self._config.turn_tokens:
                self.skipped["short"] += 1
                continue
            store = partial(self._store, generation, request.retain_s)
            writing[index] = self._put(store, request.tenant.name, turns.take(index))
        if request.retain_s is not None:
            for prompt in request.prompts:
                if prompt.prefix.num_tokens:
                    self._put(partial(self._retain, prompt.prefix, request.retain_s))
        return writing

    def submit_prompt(self, request: ParsedRequest, prompt: Generation) -> Future[None]:
        """Queues a prompt whose text goes on, for others that wait for it. Any thread."""
        kv, tenant = prompt.completion().kv, request.tenant.name
        assert kv is not None
        with self._lock:
            self._held[tenant] += kv.nbytes
        return self._put(partial(self._engine.append, prompt), tenant, kv.nbytes)

    def _repair(self, prefix: Prefix) -> None:
        """Queues an ingest of a damaged prefix, unless one is queued."""
        if prefix.id not in self._repairing:
            self._repairing.add(prefix.id)
            ended = self._put(partial(self._engine.ingest, prefix.tokens, salt=prefix.salt))
            ended.add_done_callback(lambda _: self._repairing.discard(prefix.id))

    def flush(self, seconds: float) -> bool:
        """Waits until everything is written; False if that takes longer, or is given up."""
        with self._idle:
            self._idle.wait_for(lambda: not self._pending or self._closed, seconds)
            return not self._pending

    def give_up(self) -> None:
        """Drops what waits to be written, and ends its futures; returns at once."""
        with self._idle:
            self._closed = True
            self._idle.notify_all()
        with contextlib.suppress(queue.Empty):
            while True:
                if item := self._queue.get_nowait():
                    item[1].set_result(None)
        self._queue.put(None)

    def close(self, seconds: float) -> None:
        """Drops what waits, and gives the thread so long to finish the write in progress."""
        self.give_up()
        self._thread.join(seconds)

    def _put(
        self, work: Callable[[], object], tenant: str = "", num_bytes: int = 0
    ) -> Future[None]:
        """Queues `work`. After it, or once it is dropped, the future ends and the tenant's bytes
        are released."""
        ended: Future[None] = Future()
        if num_bytes:
            ended.add_done_callback(lambda _: self.release(tenant, num_bytes))
        with self._lock:
            self._pending += 1
        self._queue.put((work, ended))
        if self._closed:
            self.give_up()
        return ended

    def _run(self) -> None:
        while not self._closed and (item := self._next()) is not None:
            work, ended = item
            try:
                self._patiently(work)
            except (CkvError, OSError, ValueError) as error:
                self.failed += 1
                _log.warning("not stored", extra={"fields": {"why": type(error).__name__}})
            except Exception:  # a bug in storing one turn must not end the thread for all others
                self.failed += 1
                _log.exception("unexpected error while storing a turn")
            finally:
                ended.set_result(None)
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()

    def _patiently(self, work: Callable[[], object]) -> None:
        """Does `work`, again and again for a while where the store could not be used: descriptors
        that ran short come back."""
        give_up_at, pause = time.monotonic() + _RETRY_S, _PAUSE_S
        while True:
            try:
                work()
                return
            except StoreUnavailable:
                with self._idle:
                    late = time.monotonic() + pause > give_up_at
                    if late or self._idle.wait_for(lambda: self._closed, pause):
                        raise
            pause *= 2

    def _next(self) -> QueuedWork | None:
        """The next work: what is queued, or, when it is time, removing expired prefixes."""
        while True:
            left = self._prune_at - time.monotonic()
            if left <= 0:
                self._prune_at = time.monotonic() + self._config.prune_s
                with self._lock:
                    self._pending += 1
                return self._engine.store.evict_expired, Future()
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=left)

    def _store(self, generation: Generation, retain_s: float | None) -> None:
        began = time.perf_counter()
        prefix = self._engine.append(generation)
        new = prefix.num_tokens - generation.completion().prefix.num_tokens
        self.cost.written(new, time.perf_counter() - began)
        if retain_s is not None:
            self._retain(prefix, retain_s, new=True)
        self.stored_turns += 1
        self.stored_tokens += new

    def _retain(self, prefix: Prefix, retain_s: float, *, new: bool = False) -> None:
        """Sets the time to live of a new prefix, and extends that of one that has one: no request
        shortens what was set before."""
        store = self._engine.store
        known = store.record_of(prefix)
        if known == PrefixRecord():
            record = PrefixRecord(retain_s=retain_s) if new else None
        else:
            longer = known.retain_s is not None and known.retain_s < retain_s
            record = replace(known, retain_s=retain_s) if longer else None
        if record is not None:
            store.set_record(prefix.id, record, salt=prefix.salt)


class Turns:
    """The turns of one request, each with the bytes reserved for its KV."""

    def __init__(self, write_behind: WriteBehind, request: ParsedRequest) -> None:
        self.request = request
        self.reserved = [0] * request.num_generations
        """Bytes, by generation; 0: it is not stored."""
        for i, prompt in enumerate(request.prompts):
            first = i * request.choices
            new_tokens = request.sampling[first].max_tokens
            self.reserved[first] = write_behind.reserve(request, prompt, new_tokens)

    @property
    def keep_kv(self) -> list[bool]:
        """For each generation, whether its KV has to be kept until it ends."""
        return [num_bytes > 0 for num_bytes in self.reserved]

    def take(self, index: int) -> int:
        """Bytes of a generation that the caller releases from now on."""
        taken, self.reserved[index] = self.reserved[index], 0
        return taken


class WriteCost:
    """Mean seconds per token of writing KV and of computing it.

    Threads may race for an update, which loses one figure of a mean.
    """

    def __init__(self) -> None:
        self.compute_s: float | None = None
        """Seconds per token of prefill."""
        self.write_s: float | None = None
        """Seconds per token written to the store."""
        self._skipped = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """Records a prefill."""
        if tokens >= _MEASURED_TOKENS:
            self.compute_s = _mean(self.compute_s, seconds / tokens)

    def written(self, tokens: int, seconds: float) -> None:
        """Records a write."""
        if tokens >= _MEASURED_TOKENS:
            self.write_s = _mean(self.write_s, seconds / tokens)

    @property
    def slow_disk(self) -> bool:
        """Whether computing KV is known to be faster than writing it."""
        if self.compute_s is None or self.write_s is None:
            return False
        return self.write_s > self.compute_s

    def worth_writing(self) -> bool:
        """Whether to write the next turn; on a slow disk one of several is, to measure again."""
        if not self.slow_disk:
            return True
        self._skipped += 1
        return self._skipped % _RETRY_EVERY == 0


def _mean(before: float | None, latest: float) -> float:
    return latest if before is None else before + _LATEST_WEIGHT * (latest - before)


# -- prompts that requests share -------------------------------------------------------------------


class PendingPrompt:
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
        """A request waits for it: its KV is written while its generation goes on."""
        self._wanted = True
        self._shared()

    def can_share(self, share: Callable[[], None]) -> None:
        """`share` has its KV written soon; it is called once, if a request waits."""
        self._share = share
        self._shared()

    def _shared(self) -> None:
        if self._wanted and self._share is not None:
            share, self._share = self._share, None
            share()


class Sharing:
    """The prompts in progress of one application. Used in one event loop.

    Args:
        least: tokens for which it is worth waiting.
        lookup: the stored part of tokens int32 [T] of a tenant's salt.
    """

    def __init__(self, least: int, lookup: Callable[[np.ndarray, str], Prefix]) -> None:
        self._least = least
        self._lookup = lookup
        self._prompts: list[PendingPrompt] = []

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
            tried: set[PendingPrompt] = set()
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
    def computing(self, salt: str, tokens: np.ndarray) -> Iterator[PendingPrompt]:
        """A prompt int32 [T] that is being computed, and will be stored, within the context."""
        prompt = PendingPrompt(salt, tokens)
        self._prompts.append(prompt)
        try:
            yield prompt
        finally:
            self._end(prompt)

    def writing(self, salt: str, tokens: np.ndarray, written: Future[None]) -> None:
        """A turn int32 [T] waits to be written, until `written` ends."""
        prompt = PendingPrompt(salt, tokens)
        prompt.computed.set()
        self._prompts.append(prompt)
        after(written, lambda: self._end(prompt), asyncio.get_running_loop())

    def _end(self, prompt: PendingPrompt) -> None:
        self._prompts.remove(prompt)
        prompt.computed.set()
        prompt.stored.set()

    def _best(
        self, tokens: np.ndarray, stored: Prefix, salt: str, tried: set[PendingPrompt]
    ) -> PendingPrompt | None:
        """The prompt in progress that has most of `tokens` that is not stored; None: none has."""
        size = stored.layout.chunk_tokens
        best, most = None, stored.num_tokens + self._least - 1
        for prompt in self._prompts:
            if prompt.salt == salt and prompt not in tried:
                common = common_length(prompt.tokens, tokens[:-1]) // size * size
                if common > most:
                    best, most = prompt, common
        return best
