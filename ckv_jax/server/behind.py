"""Writing behind answers: what was computed for one request is there for the next."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.request import Generation
from ckv_jax.server.asked import Asked, Prompt
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.pace import Pace
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.index.wishes import Wish
from ckv_jax.storage.prefix import Prefix

_log = logging.getLogger("ckv_jax.server")


@dataclass(frozen=True, slots=True)
class _Turn:
    """A text that has ended, to be stored as a prefix."""

    generation: Generation
    retain_s: float | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Mending:
    """A prefix some of which had to be computed again."""

    prefix: Prefix


class Behind:
    """Stores finished turns in a thread of its own; no answer waits for it. Thread-safe.

    A turn is stored with the KV that it was made with: nothing is computed for it. It is passed
    over, and counted in `skipped`, when it is short, approximate, one of several answers to one
    prompt, when too much waits to be written already ("busy"), or when writing takes longer than
    computing ("slow_disk").
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.pace = Pace()
        self.skipped: Counter[str] = Counter()
        self.stored_tokens = 0
        self.stored_turns = 0
        self.failed = 0
        self._engine = engine
        self._config = config
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._busy = 0
        self._idle = threading.Condition(self._lock)
        self._prune_at = time.monotonic() + config.prune_s
        self._thread = threading.Thread(target=self._run, name="ckv-behind", daemon=True)
        self._thread.start()

    def wanted(self, asked: Asked) -> list[bool]:
        """For each text, whether its keys and values are to be kept until it has ended."""
        keep = [False] * asked.texts
        for i, prompt in enumerate(asked.prompts):
            first = i * asked.choices
            why = self._why_not(prompt, asked.sampling[first].max_tokens, asked.budget)
            if why is None:
                keep[first] = True
            else:
                self.skipped[why] += 1
        return keep

    def _why_not(self, prompt: Prompt, new_tokens: int, budget: float) -> str | None:
        """Why a turn is passed over; None: it is to be stored."""
        stored = prompt.prefix.num_tokens
        most = len(prompt.tokens) + new_tokens - stored
        if len(prompt.tokens) < self._config.store_tokens or most < self._config.turn_tokens:
            return "short"
        if stored and budget < 1:
            return "approximate"
        if self._waiting_bytes >= self._config.behind_bytes:
            return "busy"
        return "slow_disk" if self._config.guard_disk and not self.pace.pays() else None

    def ended(self, asked: Asked, generations: Sequence[Generation]) -> None:
        """Takes over what one request leaves; returns at once."""
        for generation in generations:
            answer = generation.completion()
            computed = len(answer.suffix)
            self.pace.computed(computed, generation.trace.ttft_ms / 1e3)
            if generation.trace.counters.get("recomputed_chunks"):
                mending = _Mending(answer.prefix)
                self._put(lambda mending=mending: self._mend(mending))  # type: ignore[misc]
            if answer.kv is None:
                continue
            if computed + len(answer.token_ids) < self._config.turn_tokens:
                self.skipped["short"] += 1
                continue
            turn = _Turn(generation, asked.retain_s, answer.kv.nbytes)
            with self._lock:
                self._waiting_bytes += turn.num_bytes
            self._put(lambda turn=turn: self._store(turn))  # type: ignore[misc]
        if asked.retain_s is not None:
            for prompt in asked.prompts:
                if prompt.prefix.num_tokens:
                    wish = (prompt.prefix, asked.retain_s)
                    self._put(lambda wish=wish: self._wish(*wish))  # type: ignore[misc]

    def flush(self, seconds: float) -> bool:
        """Waits until nothing is left to be written; False if that takes longer."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._busy, seconds)

    def close(self) -> None:
        """Ends the thread once it has written what it is writing; the rest is given up."""
        self._queue.put(None)
        self._thread.join(self._config.drain_s)

    def _put(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._busy += 1
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except (CkvError, OSError, ValueError) as error:
                self.failed += 1
                _log.warning("not stored", extra={"fields": {"why": type(error).__name__}})
            except Exception:
                self.failed += 1
                _log.exception("unforeseen, while storing a turn")
            finally:
                with self._idle:
                    self._busy -= 1
                    self._idle.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """What is to be done next: what waits, or, when it is time, the removal of the expired."""
        while True:
            left = self._prune_at - time.monotonic()
            if left <= 0:
                self._prune_at = time.monotonic() + self._config.prune_s
                self._busy += 1
                return self._prune
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=left)

    def _prune(self) -> None:
        self._engine.store.evict_expired()

    def _store(self, turn: _Turn) -> None:
        try:
            answer = turn.generation.completion()
            began = time.perf_counter()
            prefix = self._engine.append(turn.generation)
            new = prefix.num_tokens - answer.prefix.num_tokens
            self.pace.written(new, time.perf_counter() - began)
            self.stored_turns += 1
            self.stored_tokens += new
            if turn.retain_s is not None:
                self._wish(prefix, turn.retain_s)
        finally:
            with self._lock:
                self._waiting_bytes -= turn.num_bytes

    def _mend(self, mending: _Mending) -> None:
        self._engine.ingest(mending.prefix.tokens, salt=mending.prefix.salt)

    def _wish(self, prefix: Prefix, retain_s: float) -> None:
        store = self._engine.store
        wish = store.wishes().get(prefix.id, Wish())
        try:
            store.set_wish(prefix.id, replace(wish, retain_s=retain_s), salt=prefix.salt)
        except PrefixNotFound:
            return  # it ends inside of a longer one, which has its own time to live
