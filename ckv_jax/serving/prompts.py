"""Prompts too long to be computed in one piece of memory: stored first, then answered over that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ckv_jax.errors import CkvError
from ckv_jax.ingest import Ingest
from ckv_jax.serving.scheduler import Scheduler
from ckv_jax.serving.sequence import Sequence


class Prompts:
    """Ingests prompts in a thread of its own, one after the other. Thread-safe."""

    def __init__(self, ingest: Ingest, scheduler: Scheduler) -> None:
        self._ingest = ingest
        self._scheduler = scheduler
        self._thread = ThreadPoolExecutor(1, "ckv-prompt")

    def store(self, sequence: Sequence) -> None:
        """Stores all of a sequence's tokens but the last, and submits it again over them.

        Returns at once. What goes wrong is the sequence's own outcome.
        """
        self._thread.submit(self._store, sequence)

    def _store(self, sequence: Sequence) -> None:
        try:
            tokens = sequence.tokens
            prefix = self._ingest.store(tokens[:-1], salt=sequence.prefix.salt)
            sequence.place(prefix, tokens[prefix.num_tokens :], 1.0)
            self._scheduler.submit([sequence])
        except (CkvError, ValueError) as error:
            sequence.fail(error)
        except BaseException as error:
            sequence.crash(error)

    def close(self) -> None:
        """Waits for the prompts under way. The scheduler is closed."""
        self._thread.shutdown()
