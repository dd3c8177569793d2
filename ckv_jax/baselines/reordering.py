"""KV reordering (IMPRESS §4.4.1): in the background, important tokens move into common chunks.

Within each segment the tokens of every layer are sorted by their average importance there, and
written as a new segment whose manifest holds a mapping list for each layer (§5). Attention does not
mind the order: keys carry their positions. Before the new order serves, it takes over what the
caches know and hold of the old one.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from jax import Array

from ckv_jax.baselines.probe_keys import PagedKeys
from ckv_jax.errors import CkvError
from ckv_jax.pipeline.recovery import RecoveryNeeded
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

BLOCK_TOKENS = 1024
MOST_KNOWN = 64
"""Prefixes whose averages stay in memory: 8 bytes a token and layer."""

_FRONT = 0.25  # share of the tokens that an order is judged by: IMPRESS's own budget
_SETTLED = 0.9  # share of those that are in front already


@dataclass(slots=True)
class _Known:
    """What is known of one prefix in its original order."""

    prefix: Prefix
    average: AverageImportance
    requests: int = 0
    """Since it was last looked at."""
    job: Future[Prefix | None] | None = None
    reordered: Prefix | None = None

    @property
    def orders(self) -> list[Prefix]:
        """The order that is served, and the one that was written since."""
        job = self.job
        made = job is not None and job.done() and not job.cancelled() and not job.exception()
        written = job.result() if job is not None and made else None
        return [one for one in (self.reordered, written) if one is not None]


class Reorderer:
    """Averages token importance and rewrites prefixes in a thread of its own, again and again.

    Engine thread only, except the rewriting itself.
    """

    def __init__(self, keys: PagedKeys, every: int) -> None:
        """`every`: requests over a prefix after which its order is looked at, 0: never. It is
        rewritten where that is off by more than a tenth, see `AverageImportance.settled`."""
        self._keys = keys
        self._add_job = keys.worker.add_job
        self._store = keys.worker.store
        self._codec = keys.worker.system.coder
        self._every = every
        self._known: OrderedDict[str, _Known] = OrderedDict()  # the least recently used first
        self._served: dict[str, str] = {}  # id of a reordered prefix -> that of its original
        self._thread = ThreadPoolExecutor(1, "ckv-reorder")

    def current(self, prefix: Prefix) -> Prefix:
        """The reordered form of `prefix` once there is one, else `prefix` itself."""
        if not self._every or prefix.layout.reordered or not prefix.num_tokens:
            return prefix
        known = self._known.get(prefix.id)
        if known is None:
            layers = prefix.layout.num_layers
            known = _Known(prefix, AverageImportance(layers, prefix.num_tokens))
            self._forget_oldest()
            self._known[prefix.id] = known
            stored = self._stored(prefix)  # by an earlier process
            if stored.num_tokens == prefix.num_tokens:
                self._serve(known, stored)
        self._known.move_to_end(prefix.id)
        if known.job is not None and known.job.done():
            rewritten = known.job.result()
            if rewritten is not None:
                self._serve(known, rewritten)
            known.job = None  # last: another rewriting leaves what is about to serve
        return known.reordered or prefix

    def note(self, prefix: Prefix, importance: Sequence[Array]) -> None:
        """A request over `prefix`, in the form that was served, is done; `importance` has [>= T]
        for each layer, in the stored order."""
        known = self._known.get(self._served.get(prefix.id, prefix.id))
        if known is None:
            return
        self._thread.submit(self._average, known, prefix, importance)
        known.requests += 1
        if known.requests >= self._every and known.job is None:
            known.requests = 0
            known.job = self._thread.submit(self._rewrite, known, known.reordered)

    def forget(self, prefix: Prefix) -> None:
        """Drops what is known of `prefix`, in either order; the store may know more."""
        name = self._served.get(prefix.id, prefix.id)
        known = self._known.pop(name, None)
        if known is not None and known.reordered is not None:
            self._served.pop(known.reordered.id, None)

    def _forget_oldest(self) -> None:
        """Makes room for one more prefix; those that are being rewritten stay."""
        for known in list(self._known.values()):
            if len(self._known) < MOST_KNOWN:
                return
            if known.job is None or known.job.done():
                self.forget(known.prefix)

    def wait(self) -> None:
        """Returns once nothing is being rewritten or carried over."""
        for known in list(self._known.values()):
            if known.job is not None:
                known.job.result()

    def close(self) -> None:
        """Lets the rewrite in progress finish and drops the others. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    def _serve(self, known: _Known, reordered: Prefix) -> None:
        known.reordered = reordered
        self._served[reordered.id] = known.prefix.id

    # From here on, in the thread.

    def _average(self, known: _Known, prefix: Prefix, importance: Sequence[Array]) -> None:
        try:
            order = self._order(prefix) if prefix.layout.reordered else None
        except CkvError:
            return  # one request less
        known.average.add([np.asarray(layer) for layer in importance], order)

    def _order(self, prefix: Prefix) -> np.ndarray:
        with self._store.reader(prefix) as reader:
            return reader.order

    def _rewrite(self, known: _Known, before: Prefix | None) -> Prefix | None:
        """The prefix in its new order; None where it would be the old one, nearly, or where the
        store has no room, or has lost some of it."""
        try:
            if before is not None and known.average.settled(self._order(before), before):
                return None
            written = self._write(known.prefix, known.average, again=before is not None)
            self._add_job(carried(self._keys, before or known.prefix, written)).result()
            if before is not None:
                others = [one for one in list(self._known.values()) if one is not known]
                served = [one for other in others for one in other.orders]
                shared = {span.segment_id for prefix in served for span in prefix.spans}
                own = tuple(span for span in before.spans if span.segment_id not in shared)
                self._store.delete(dataclasses.replace(before, spans=own))
        except (CkvError, CancelledError, ValueError):
            return None
        return written

    def _write(self, prefix: Prefix, average: AverageImportance, *, again: bool) -> Prefix:
        """In new segments; at first those of parents stay that another prefix has had reordered."""
        layout = dataclasses.replace(prefix.layout, reordered=True)
        stored = Prefix.empty(prefix.fingerprint, layout, prefix.salt)
        if not again:
            stored = self._stored(prefix)
        kv = read_kv(self._store, prefix, codec=self._codec)
        ends = np.cumsum([span.num_chunks for span in prefix.spans]) * layout.chunk_tokens
        for end in np.minimum(ends, prefix.num_tokens).tolist():
            start = stored.num_tokens
            if end <= start:
                continue
            order = average.order(start, end)
            with self._store.writer(
                fingerprint=prefix.fingerprint,
                layout=layout,
                tokens=prefix.tokens[start:end],
                parent=stored if start else None,
                salt=prefix.salt,
                order=order,
                codec=self._codec,
            ) as writer:
                for first in range(0, end - start, BLOCK_TOKENS):
                    at = start + order[:, None, first : first + BLOCK_TOKENS, None, None]
                    writer.write(first, np.take_along_axis(kv, at, axis=2))
                stored = writer.commit()
        return stored

    def _stored(self, prefix: Prefix) -> Prefix:
        return self._store.longest_prefix(
            prefix.tokens,
            fingerprint=prefix.fingerprint,
            layout=dataclasses.replace(prefix.layout, reordered=True),
            salt=prefix.salt,
        )


def use_in_order(prefixes: OpenPrefixes, prefix: Prefix) -> OpenPrefix:
    """`prefix` for one more user, who closes it, with the order of its tokens. Raises a
    `StoreError` if that cannot be read."""
    opened = prefixes.use(prefix)
    try:
        if prefix.layout.reordered and opened.order is None:
            opened.order = opened.reader.order
    except BaseException:
        opened.close()
        raise
    return opened


def carry_scores(worker: Worker, old: OpenPrefix, new: Prefix, new_order: np.ndarray) -> None:
    """Persists for the segments of `new` what is known of `old`, which has the same tokens in
    another order: each chunk gets the mean importance and frequency of its tokens, which is that of
    the chunks where they were. `new_order` int [L, T].

    Segments of `new` in memory go on with the scores that they have there.
    """
    layout, every = new.layout, np.arange(old.num_chunks)
    size, tokens, order = layout.chunk_tokens, new.num_tokens, old.order
    starts, lengths = every * size, old.chunk_lengths
    shape = (layout.groups, len(every))
    importance, frequency = np.zeros(shape, np.float32), np.zeros(shape, np.uint32)
    for group in range(layout.groups):
        layer = layout.group_layers(group)[0]
        values = np.stack(worker.memory.tiers.history(old.pages(group, every)))
        stored = np.repeat(values, size, axis=1)[:, :tokens]
        known = np.empty_like(stored)
        known[:, slice(None) if order is None else order[layer]] = stored
        means = np.add.reduceat(known[:, new_order[layer]], starts, axis=1) / lengths
        importance[group], frequency[group] = means[0], np.rint(means[1])
    first = 0
    for span in new.spans:
        part = slice(first, first + span.num_chunks)
        if span.num_chunks == span.segment_chunks:
            worker.store.save_scores(span.segment_id, importance[:, part], frequency[:, part])
        first = part.stop


def carried(keys: PagedKeys, old: Prefix, new: Prefix) -> Generator[None, None, None]:
    """In every layer group as many packs of `new` come to memory as were there of `old`, those that
    are worth most by what was known of their tokens. A group a `yield`.

    Their bytes come from the store, as a chunk's tokens were in many chunks before. It ends early,
    and well, where running requests leave no room or the store cannot give something; what is not
    carried over is read when it is asked for.
    """
    worker, trace = keys.worker, Trace()
    tiers = worker.memory.tiers
    with ExitStack() as stack:
        try:
            before = use_in_order(worker.prefixes, old)
            stack.callback(before.close)
            with worker.store.reader(new) as reader:
                order = reader.order
            carry_scores(worker, before, new, order)
            after = use_in_order(worker.prefixes, new)
            stack.callback(after.close)
            probes = keys.of(after, trace, stack)
            every = np.arange(after.num_chunks)
            for group in range(new.layout.groups):
                yield
                held = tiers.let_go(before.pages(group, every))
                worth = tiers.worth(after.pages(group, every))
                best = np.argsort(-worth, kind="stable")[:held]
                if held:
                    worker.make_way(held)
                    with worker.packs([after], trace) as packs:
                        packs.demand(0, group, best)
                        packs.collect(0, group, best)
            for layer in range(worker.plan.periods):
                yield
                held = tiers.let_go(keys.pages(before).of(layer))
                if held:
                    probes.bring(layer)
        except (PoolExhausted, RecoveryNeeded, StoreError):
            pass
    worker.prefixes.drop(old)


class AverageImportance:
    """The mean share of a layer's attention that each token got, float64 [L, T], over requests.

    Requests count alike, however many heads were scored in a layer.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        self._total = np.zeros((layers, tokens))

    def add(self, importance: Sequence[np.ndarray], order: np.ndarray | None) -> None:
        """One request's attention, [>= T] for each layer; `order` int [L, T]: the position of each
        token, None: as it is."""
        tokens = self._total.shape[1]
        for layer, values in enumerate(importance):
            share = np.asarray(values, np.float64)[:tokens]
            share = share / max(float(share.sum()), np.finfo(np.float64).tiny)
            self._total[layer, slice(None) if order is None else order[layer]] += share

    def order(self, start: int, end: int) -> np.ndarray:
        """The tokens from `start` up to `end`, counted from there, the most important first, int32
        [L, end - start]; the earlier one of equals."""
        order: np.ndarray = np.argsort(-self._total[:, start:end], axis=1, kind="stable")
        return order.astype(np.int32)

    def settled(self, order: np.ndarray, prefix: Prefix) -> bool:
        """Whether nine in ten of the most important quarter of each segment's tokens are in its
        first quarter as `order` int [L, T] has them, averaged over layers and segments."""
        there, start = [], 0
        for span in prefix.spans:
            end = min(start + span.num_chunks * prefix.layout.chunk_tokens, prefix.num_tokens)
            front = max(1, round(_FRONT * (end - start)))
            best = self.order(start, end)[:, :front] + start
            held = order[:, start : start + front]
            there += [
                len(np.intersect1d(wanted, found)) / front
                for wanted, found in zip(best, held, strict=True)
            ]
            start = end
        return float(np.mean(there)) >= _SETTLED
