"""KV reordering (IMPRESS §4.4.1): in the background, important tokens move into common chunks.

Tokens are sorted by average importance within each segment and written as a new segment whose
manifest holds the mapping list. Attention does not mind the order: keys carry their positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from jax import Array

from ckv_jax.errors import CkvError
from ckv_jax.storage.codec import Codec
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore
from ckv_jax.stored_kv import read_kv

REORDER_AFTER = 4
"""Requests whose importance is averaged first. The paper reorders every ten minutes; a count of
requests gives the same averages whatever the load."""

BLOCK_TOKENS = 1024


@dataclass(slots=True)
class _Known:
    """What is known of one prefix in its original order."""

    seen: list[Sequence[Array]] = field(default_factory=list)
    job: Future[Prefix | None] | None = None
    reordered: Prefix | None = None


class Reorderer:
    """Averages token importance and rewrites prefixes in a thread of its own.

    Engine thread only, except the rewriting itself. A context manager's duties are `close`'s.

    Args:
        replaced: told of a prefix that is served from its reordered segments from now on.
        codec: that of the prefixes.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        replaced: Callable[[Prefix], None],
        codec: Codec | None = None,
        after: int = REORDER_AFTER,
    ) -> None:
        self._store = store
        self._codec = codec
        self._replaced = replaced
        self._after = after
        self._known: dict[str, _Known] = {}
        self._thread = ThreadPoolExecutor(1, "ckv-reorder")

    def current(self, prefix: Prefix) -> Prefix:
        """The reordered form of `prefix` once there is one, else `prefix` itself."""
        if prefix.layout.reordered or not prefix.num_tokens:
            return prefix
        known = self._known.get(prefix.id)
        if known is None:
            known = self._known[prefix.id] = _Known()
            stored = self._stored(prefix)  # by an earlier process
            if stored.num_tokens == prefix.num_tokens:
                known.reordered = stored
        if known.job is not None and known.job.done():
            known.reordered, known.job = known.job.result(), None
            if known.reordered is not None:
                self._replaced(prefix)
        return known.reordered or prefix

    def note(self, prefix: Prefix, importance: Sequence[Array]) -> None:
        """A request over `prefix` is done; `importance` has [>= T] for each layer."""
        known = self._known.get(prefix.id)
        if known is None or known.job is not None or known.reordered is not None:
            return
        known.seen.append(importance)
        if len(known.seen) >= self._after:
            known.job = self._thread.submit(self._rewrite, prefix, known.seen)
            known.seen = []

    def forget(self, prefix: Prefix) -> None:
        """`prefix`, in either order, is no longer in the store."""
        for name, known in list(self._known.items()):
            if name == prefix.id or (known.reordered and known.reordered.id == prefix.id):
                del self._known[name]

    def wait(self) -> None:
        """Returns once nothing is being rewritten."""
        for known in self._known.values():
            if known.job is not None:
                known.job.result()

    def close(self) -> None:
        """Lets the rewrite under way finish and drops the others. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    def _rewrite(self, prefix: Prefix, seen: list[Sequence[Array]]) -> Prefix | None:
        """The prefix in its new order; None where the store has no room, or has lost some of it."""
        try:
            return self._write(prefix, average_importance(seen, prefix.num_tokens))
        except CkvError:
            return None

    def _write(self, prefix: Prefix, importance: np.ndarray) -> Prefix:
        stored = self._stored(prefix)  # parents that another prefix has had reordered
        kv = read_kv(self._store, prefix, codec=self._codec)
        size = prefix.layout.chunk_tokens
        ends = np.cumsum([span.num_chunks for span in prefix.spans]) * size
        for end in np.minimum(ends, prefix.num_tokens).tolist():
            start = stored.num_tokens
            if end <= start:
                continue
            order = np.argsort(-importance[start:end], kind="stable").astype(np.int32)
            with self._store.writer(
                fingerprint=prefix.fingerprint,
                layout=reordered(prefix.layout),
                tokens=prefix.tokens[start:end],
                parent=stored if start else None,
                salt=prefix.salt,
                order=order,
                codec=self._codec,
            ) as writer:
                for first in range(0, len(order), BLOCK_TOKENS):
                    part = start + order[first : first + BLOCK_TOKENS]
                    writer.write(first, np.take(kv, part, axis=2))
                stored = writer.commit()
        return stored

    def _stored(self, prefix: Prefix) -> Prefix:
        return self._store.longest_prefix(
            prefix.tokens,
            fingerprint=prefix.fingerprint,
            layout=reordered(prefix.layout),
            salt=prefix.salt,
        )


def reordered(layout: Layout) -> Layout:
    """`layout` with a mapping list in each segment."""
    return dataclasses.replace(layout, reordered=True)


def average_importance(seen: Sequence[Sequence[Array]], tokens: int) -> np.ndarray:
    """Mean share of the attention that each token got, float64 [T], over layers and requests.

    Layers count alike, however many heads were scored in them.
    """
    total = np.zeros(tokens)
    for request in seen:
        for layer in request:
            values = np.asarray(layer, np.float64)[:tokens]
            total += values / max(float(values.sum()), np.finfo(np.float64).tiny)
    return total / max(1, sum(len(request) for request in seen))
