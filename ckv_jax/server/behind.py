"""Writing behind answers: what was computed for one request is there for the next."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ckv_jax.budget import Budget
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.request import Generation
from ckv_jax.server.asked import Asked, Prompt
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.pace import Pace
from ckv_jax.storage.index.wishes import Wish
from ckv_jax.storage.prefix import Prefix

_log = logging.getLogger("ckv_jax.server")


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
        self._closed = False
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

    def _why_not(self, prompt: Prompt, new_tokens: int, budget: float | str) -> str | None:
        """Why a turn is passed over; None: it is to be stored."""
        stored = prompt.prefix.num_tokens
        most = len(prompt.tokens) + new_tokens - stored
        if len(prompt.tokens) < self._config.store_tokens or most < self._config.turn_tokens:
            return "short"
        if stored and not Budget.of(budget).exact:
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
            if generation.trace.of(answer.prefix.id, "recomputed_chunks"):
                self._put(partial(self._mend, answer.prefix))
            if answer.kv is None:
                continue
            if computed + len(answer.token_ids) < self._config.turn_tokens:
                self.skipped["short"] += 1
                continue
            with self._lock:
                self._waiting_bytes += answer.kv.nbytes
            self._put(partial(self._store, generation, answer.kv.nbytes, asked.retain_s))
        if asked.retain_s is not None:
            for prompt in asked.prompts:
                if prompt.prefix.num_tokens:
                    self._put(partial(self._keep, prompt.prefix, asked.retain_s))

    def flush(self, seconds: float) -> bool:
        """Waits until nothing is left to be written; False if that takes longer, or is given up."""
        with self._idle:
            self._idle.wait_for(lambda: not self._busy or self._closed, seconds)
            return not self._busy

    def give_up(self) -> None:
        """What waits to be written is not written any more; returns at once."""
        with self._idle:
            self._closed = True
            self._idle.notify_all()
        self._queue.put(None)

    def close(self, seconds: float) -> None:
        """Gives up what waits, and has the thread so long to finish what it is writing."""
        self.give_up()
        self._thread.join(seconds)

    def _put(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._busy += 1
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._next()) is not None and not self._closed:
            try:
                work()
            except (CkvError, OSError, ValueError) as error:
                self.failed += 1
                _log.warning("not stored", extra={"fields": {"why": type(error).__name__}})
            except Exception:  # a bug in storing one turn must not end the thread for all others
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
                with self._lock:
                    self._busy += 1
                return self._prune
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=left)

    def _prune(self) -> None:
        self._engine.store.evict_expired()

    def _store(self, generation: Generation, num_bytes: int, retain_s: float | None) -> None:
        try:
            began = time.perf_counter()
            prefix = self._engine.append(generation)
            new = prefix.num_tokens - generation.completion().prefix.num_tokens
            self.pace.written(new, time.perf_counter() - began)
            self.stored_turns += 1
            self.stored_tokens += new
            if retain_s is not None:
                self._keep(prefix, retain_s, new=True)
        finally:
            with self._lock:
                self._waiting_bytes -= num_bytes

    def _mend(self, prefix: Prefix) -> None:
        self._engine.ingest(prefix.tokens, salt=prefix.salt)

    def _keep(self, prefix: Prefix, retain_s: float, *, new: bool = False) -> None:
        """Gives a new prefix a time to live, and one that has had one a longer one: no request
        shortens what was wanted before."""
        store = self._engine.store
        known = store.wishes().get(prefix.id)
        if known is None:
            wish = Wish(retain_s=retain_s) if new else None
        else:
            longer = known.retain_s is not None and known.retain_s < retain_s
            wish = replace(known, retain_s=retain_s) if longer else None
        if wish is not None:
            store.set_wish(prefix.id, wish, salt=prefix.salt)
