"""What the leader's engine thread does, done again by a process that follows: the same calls."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NoReturn

import numpy as np

from ckv_jax.errors import ProcessFailed
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.peers import Peers
from ckv_jax.pipeline.prefill import Block, Prefill
from ckv_jax.request import Request
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.stored_kv import EarlierKv
from ckv_jax.trace import Trace

Stored = tuple[str, str, str, list[int]]
"""(id, salt, provenance, tokens) of a stored prefix."""


class Follower:
    """One engine's worker without its scheduler: what comes next is said by the leader.

    What fails where a process works by itself fails in all at once, and the leader decides what
    becomes of it; anything else that is raised here ends the process, which the leader notices.
    """

    def __init__(
        self, worker: Worker, store: ChunkStore, fingerprint: Fingerprint, peers: Peers
    ) -> None:
        self._peers = peers
        self._worker = worker
        self._store = store
        self._fingerprint = fingerprint
        self._prefills: dict[int, Prefill] = {}
        self._blocks: dict[int, Block] = {}

    def run(self, commands: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Does them all, in order."""
        for command, facts in commands:
            try:
                getattr(self, command)(**facts)
            except ProcessFailed:
                continue  # in every process: the leader knows

    def first_tokens(self, batch: list[dict[str, Any]]) -> None:
        """See `Worker.first_tokens`."""
        try:
            sequences = [self._sequence(**facts) for facts in batch]
        except Exception:  # whatever it is, the leader is to know
            self._failed()
        self._worker.first_tokens(sequences)

    def step(self, going: list[tuple[int, int, Any]]) -> None:
        """See `Worker.step`."""
        self._worker.follow(going)

    def prefill(
        self, number: int, tokens: list[int], start: int, bounded: bool,
        before: Stored | None,
        live: list[int],
    ) -> None:  # fmt: skip
        """See `Prefills.begin`."""
        for gone in set(self._prefills) - set(live):
            del self._prefills[gone]
            self._blocks.pop(gone, None)
        layout = self._worker.layout
        with ExitStack() as stack:
            reader = None
            try:
                if before is not None:
                    reader = stack.enter_context(self._store.reader(self._found(before)))
                earlier = EarlierKv(layout, self._worker.system.coder, start, reader, None)
            except Exception:  # as above
                self._failed()
            self._prefills[number] = self._worker.prefills.begin(
                np.array(tokens, np.int32), start=start, earlier=earlier, bounded=bounded
            )

    def block(self, number: int) -> None:
        """See `Prefill.advance`."""
        prefill = self._prefills[number]
        block = prefill.advance()
        if not prefill.bounded:
            self._blocks[number] = block  # a first token may be asked for
        elif prefill.done:
            del self._prefills[number]  # its device memory is for others now

    def first(self, number: int, last: int, sequence: dict[str, Any]) -> None:
        """The first token after a prefill that stores nothing, and what goes on from it."""
        prefill, block = self._prefills.pop(number), self._blocks.pop(number)
        logits, token = self._worker.layers.head(block.hidden, np.array([last], np.int32))
        found = self._sequence(**sequence)
        if found.sampling is not None:
            self._worker.alone.dense_done(
                found, np.asarray(logits), int(np.asarray(token)[0]), prefill.kv, Trace()
            )

    def _failed(self) -> NoReturn:
        """Says so where the leader first asks whether all could do their part."""
        with self._peers.local():
            raise
        raise AssertionError("a failure was agreed to be none")

    def _sequence(
        self, number: int, prefix: Stored | None, suffix: list[int], budget: float | str,
        sampling: dict[str, Any] | None,
    ) -> Sequence:  # fmt: skip
        """A sequence of the leader's, for whose outcome nobody waits here."""
        params = None
        if sampling is not None:
            lists = {key: tuple(x) for key, x in sampling.items() if isinstance(x, list)}
            params = SamplingParams(**sampling | lists)
        found = Sequence(Request(prefix=[], suffix=suffix), sampling=params)
        found.number = number
        stored = None if prefix is None else self._found(prefix)
        empty = Prefix.empty(self._fingerprint, self._worker.layout, "")
        found.place(stored or empty, np.array(suffix, np.int32), budget)
        return found

    def _found(self, named: Stored) -> Prefix:
        """The leader's prefix, which may end within one that is stored. Raises `StoreError`."""
        prefix_id, salt, provenance, tokens = named
        found = self._store.longest_prefix(
            np.array(tokens, np.int32), fingerprint=self._fingerprint, layout=self._worker.layout,
            salt=salt, provenance=provenance,
        )  # fmt: skip
        if found.id != prefix_id:
            raise PrefixNotFound(prefix_id)
        return found
