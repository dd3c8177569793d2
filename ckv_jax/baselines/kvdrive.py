"""KVDrive: clusters, a sliding window on the device, and sequences in a pipeline (`kvdrive`).

Sections are those of Lin et al. 2026 (arXiv 2605.18071). docs/baselines.md says what differs.

- §4, hierarchical index: chunks of 4 tokens are grouped by their mean keys, per layer and KV head
  (`decoding.clusters`). The paper has centroids of k-means; here halving makes clusters of exactly
  16 tokens, each known by its mean key.
- §5.1, sliding window with lookahead eviction: what scores lowest at the current token leaves
  first (`decode.window.lookahead`).
- §5.2, window scaling: windows of several widths by layer and head (`window_widths`).
- §6.1, selection, fetch and compute apart: `Pipelined`.
- §6.2, pipeline tuning: `tune`. The number of centroids follows the context: 16 tokens each.
- §7.1, warm-up by importance, and §7.3 (d), the split of host memory: `WarmUp`.
- §7.2, layout: packs of one head and layer in one stretch of a file, where clusters of alike keys
  are neighbours (`grouping.alike`).
- §7.3 (b) and (c): packs alone are read, in jobs of many; near misses are read ahead.
- §9.1: the first 16 and the latest 64 tokens take part in every selection; in the paper's baselines
  4 and 64.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from ckv_jax.baselines.decoding import clusters, in_every_layer
from ckv_jax.baselines.window_widths import (
    ProfiledSelections,
    Recording,
    in_engine,
    profile_windows,
    selections_of,
)
from ckv_jax.config import OwnParts
from ckv_jax.decode.selection import DecodeSelection
from ckv_jax.decode.token import DecodeContext
from ckv_jax.decode.window import Keep, WindowPacks, lookahead
from ckv_jax.engine import Engine
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.pipeline.batch import Batch, Member
from ckv_jax.pipeline.executor import Executor, FirstToken
from ckv_jax.pipeline.recovery import RecoveryNeeded
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.policy import Policy, frequency_then_attention
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.request import Request
from ckv_jax.selection.base import Selection, rows_of
from ckv_jax.selection.select import Ends, Select
from ckv_jax.serving.worker import Worker
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

MICRO_BATCHES = (1, 2, 4, 8)
"""Into how many a batch may be cut (§6.2: "the candidate range is limited")."""
WINDOWS = (1.5, 2.0, 3.0, 4.0)
"""Widths of windows, in selections, that a calibration tries in this order (§6.2, Figure 16)."""

_log = logging.getLogger(__name__)


# -- §6.1, selection, fetch and compute apart ------------------------------------------------------


class NearMisses(DecodeSelection):
    """Reads ahead for the next token what one nearly selected: ranks K to `near` times K (§5.1,
    Figure 7; §7.3 (c)). Reads are behind every demand.

    K is the number of chunks that a row selected; rank K is the best of the others. This is for
    systems without a coarse pass and without `peaks`: with either, `Found.scores` alone do not say
    what is selected.
    """

    looks_up = False

    def __init__(
        self, context: DecodeContext, *, keep: Keep = lookahead, near: float = 1.25
    ) -> None:
        super().__init__(context, keep=keep)
        self._near = near
        self._best_left = context.runtime.layers.programs.jit(_best_left, static=("count",))
        self._left: dict[int, list[Array]] = {}
        """By period, of each due call: see `_best_left`."""

    @property
    def _reads_ahead(self) -> bool:
        """Whether the token's near misses are read."""
        return self._windows.held and not self.keeps

    def _collect(self, period: int) -> None:
        if self._reads_ahead:
            self._rank_left(period)  # while the packs of the selections are read
        super()._collect(period)

    def _rank_left(self, period: int) -> None:
        """Dispatches the ranking of what the due calls of a period did not select."""
        self._left[period] = []
        count = math.ceil(self._columns * self._near) - self._columns
        for call in self._due_calls[period]:
            found, num_chunks = call.found, call.of.num_chunks
            assert found is not None
            self._left[period].append(
                self._best_left(found.scores, found.recent.ids, num_chunks, count=count)
            )

    def settled(self, ids: np.ndarray) -> None:
        """Starts reads of what the token nearly selected, and gives up earlier ones that it did
        not."""
        if not self._reads_ahead:
            return
        windows, selections = self._windows, self._plan.selections
        chunks = windows.lengths.shape[1]
        near = []
        for period, left in jax.device_get(self._left).items():
            for call, best_left in zip(self._due_calls[period], left, strict=True):
                assert call.record is not None
                best = best_left[call.rows]
                count = (call.record.ids >= 0).sum(axis=1, keepdims=True)
                more = np.arange(best.shape[1]) < np.ceil(count * self._near) - count
                key = (self._which[call.place] * selections + call.selection) * chunks
                near.append((key[:, None] + best)[more & (best >= 0)])
        key = (self._which[self._places][:, None] * selections + np.arange(selections)) * chunks
        taken = (key[:, :, None] + ids)[ids >= 0]
        missed = np.setdiff1d(np.concatenate(near), taken)
        if not len(missed) and self._packs is None:
            return
        key, chunk = np.divmod(missed, chunks)
        which, selection = np.divmod(key, selections)
        at, column = np.nonzero(windows.groups[selection] >= 0)
        wanted = which[at], windows.groups[selection[at], column], chunk[at]
        self._opened().drop_ahead(*wanted)  # near misses of the token before alone
        self._opened().ahead(*wanted, apart=True)


def _best_left(
    scores: Float32[Array, "R M"],
    ids: Int32[Array, "R n"],
    num_chunks: Int32[Array, " prefixes"],
    *,
    count: int,
) -> Int32[Array, "R k"]:
    """The `count` best chunks that each row did not select, best first, -1 past the last one.
    Among equals the lower id comes first.

    `ids`: the selected ones, -1 past a row's end.
    """
    chunks = scores.shape[1]
    left = jnp.arange(chunks)[None, :] < rows_of(num_chunks, scores)[:, None]
    rows = jnp.arange(len(scores))[:, None]
    left = left.at[rows, jnp.where(ids >= 0, ids, chunks)].set(False, mode="drop")
    values, best = jax.lax.top_k(jnp.where(left, scores, -jnp.inf), min(count, chunks))
    return jnp.where(values > -jnp.inf, best, -1)


class Pipelined(NearMisses, Recording):
    """Select(i), look-up(i - 1) and fetch(i - 2) of micro-batches at once; then the whole batch
    computes.

    All micro-batches' selections are dispatched together and run one after the other on the device.
    As each is done, this thread looks up what its rows' windows lack, while the next one selects.
    Reader threads fetch what is on the SSD meanwhile, and this thread copies what host memory
    has. Attention to all rows begins once every pack is there. Caches hear of a token while its
    last layers compute (`finish`).

    Near misses are read ahead from then on, while the next token computes and selects.
    """

    def __init__(self, context: DecodeContext, drive: KvDriveSelections) -> None:
        super().__init__(context, near=drive.near)
        self._drive = drive
        self._dispatched_ns = 0

    @property
    def _reads_ahead(self) -> bool:
        return self._drive.ahead and super()._reads_ahead

    def _calls_of(self, period: int) -> list[Any]:
        """One call per micro-batch, whose prefixes follow the order of the rows."""
        whole = self._by_prefix
        calls = []
        for mine in np.array_split(np.arange(len(whole)), self._drive.cut(len(whole))):
            self._by_prefix = [whole[which] for which in mine.tolist()]
            calls += super()._calls_of(period)
        self._by_prefix = whole
        return calls

    def _demand_all(self, period: int) -> None:
        """Stages of a layer whose input is there, see the class."""
        drive, clock = self._drive, time.perf_counter_ns
        began = clock()
        if self._dispatched_ns:
            self._trace.add("layer", "compute", self._dispatched_ns, began, layer=period - 1)
        ended = 0  # of a selection that this thread has found done while it did something else
        for number, call in enumerate(calls := self._calls[period]):
            about = {"layer": period, "micro_batch": number}
            assert call.found is not None
            call.found.record.block_until_ready()
            selected = clock()
            self._trace.add("select", "select", began, ended or selected, **about)
            began, ended = ended or selected, 0
            following = calls[number + 1].found if number + 1 < len(calls) else None
            self._demand(call)
            looked_up = clock()
            if following is not None and following.record.is_ready():  # type: ignore[attr-defined]
                ended = looked_up
            if call.away is not None:
                self._fetch_from_host(call.away, call.wanted, call.back)
            fetched = clock()
            self._trace.add("look up", "look-up", selected, looked_up, **about)
            self._trace.add("copy", "host memory", looked_up, fetched, **about)
            drive.spent_ns[0] += looked_up - selected
            drive.spent_ns[1] += fetched - looked_up

    def _fetch_from_host(
        self, away: WindowPacks, wanted: tuple[np.ndarray, ...], back: np.ndarray
    ) -> None:
        """Copies to the device what host memory has, of packs `wanted`; readers bring the rest."""
        page = np.empty(len(wanted[0]), np.int64)
        page[back] = away.page
        here = self._tiers.lookup(page)[1] >= 0
        if here.any():
            self._opened().collect(*(part[here] for part in wanted))
        if self._drive.counting:
            np.add.at(self._drive.stalls, away.selection[~here[back]], 1)

    def _collect(self, period: int) -> None:
        began = time.perf_counter_ns()
        super()._collect(period)
        ended = time.perf_counter_ns()
        self._trace.add("wait", "fetch", began, ended, layer=period)
        self._drive.spent_ns[1] += ended - began

    def dispatched(self, period: int) -> None:
        """A layer is about to compute."""
        self._dispatched_ns = time.perf_counter_ns()

    def finish(self) -> None:
        super().finish()
        self._dispatched_ns = 0
        if self._drive.timeline is not None:
            self._drive.timeline.append(self._trace)


class KvDriveSelections(ProfiledSelections):
    """How one engine's generations are cut into micro-batches, and how wide their windows are.
    Engine thread only."""

    def __init__(
        self,
        context: DecodeContext,
        *,
        micro_batches: int | None = None,
        even: bool = False,
        near: float = 1.25,
    ) -> None:
        """`micro_batches` of a batch, None: 2 until `tune` finds a better number; `even`: windows
        are as wide for every layer and head, and host memory goes by importance alone; `near`:
        see `NearMisses`, 1: nothing is read ahead."""
        super().__init__(context)
        self.micro_batches = micro_batches or 2
        self.cuts = MICRO_BATCHES if micro_batches is None else (micro_batches,)
        """Numbers of micro-batches that `tune` tries."""
        self.even = even
        self.near = near
        self.ahead = near > 1
        """Whether near misses are read ahead."""
        self.times = min(2.0, context.runtime.system.window)
        self.spent_ns = [0, 0]
        """What look-ups and fetches have taken so far."""
        self.stalls = np.zeros(context.runtime.plan.selections, np.int64)
        """Packs that each layer and head had to wait for the SSD for, while `counting`."""
        self.counting = False
        self.timeline: list[Trace] | None = None
        """Takes every token's trace, where there is one. Reads ahead end after their token."""

    def batch(self) -> DecodeSelection:
        return Pipelined(self.context, self)

    def cut(self, prefixes: int) -> int:
        """How many micro-batches a batch over some prefixes has: rows over one select together."""
        return max(1, min(self.micro_batches, prefixes))


# -- §6.2, pipeline tuning -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What a calibration found."""

    window: float
    """Selections that a window holds."""
    micro_batches: int
    ahead: bool
    """Whether near misses are read ahead."""
    windows: tuple[tuple[float, float, float], ...]
    """Of each width that was tried: seconds of look-ups and of fetches."""
    seconds: tuple[tuple[int, float], ...]
    """Of each number of micro-batches that was tried."""


def tune(
    engine: Engine,
    requests: Sequence[Request],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    window: float | None = None,
) -> Tuning:
    """Short runs of these requests before those that count, see §6.2, §5.2 and §7.3 (d).

    First windows grow until looking up takes as long as fetching, or have `window` selections.
    Within that memory their widths go by layer and head, and so does the host's memory, by where
    packs were waited for; windows of one selection are all as wide. Then the number of
    micro-batches is the fastest, and near misses are read ahead if that is faster than without.
    Generations that begin from now on go by it; no answer depends on it. Raises as
    `profile_windows`.
    """
    drive = selections_of(engine, KvDriveSelections)

    def run(**values: Any) -> float:
        """Seconds of a run with these values, once what it needs is compiled."""
        for _ in range(2):
            in_engine(engine, drive, spent_ns=[0, 0], **values)
            began = time.perf_counter()
            for text in engine.generate(requests, sampling).results():
                text.raise_for_error()
        return time.perf_counter() - began

    windows = []
    for times in WINDOWS if window is None else (window,):
        if times > engine.system.window:
            break
        run(times=times)
        windows.append((times, drive.spent_ns[0] / 1e9, drive.spent_ns[1] / 1e9))
        if drive.spent_ns[0] >= drive.spent_ns[1]:
            break
    if not drive.even and drive.times > 1:
        in_engine(engine, drive, counting=True, stalls=np.zeros_like(drive.stalls))
        profile_windows(engine, requests, sampling)
        in_engine(engine, drive, counting=False)
    ahead = drive.near > 1
    counts = [count for count in drive.cuts if count <= len(requests)]
    seconds = [(count, run(micro_batches=count, ahead=ahead)) for count in counts]
    fastest, least = min(seconds, key=lambda one: one[1])
    if ahead:
        ahead = run(micro_batches=fastest, ahead=False) >= least
    in_engine(engine, drive, micro_batches=fastest, ahead=ahead)
    return Tuning(
        window=drive.times, micro_batches=fastest, ahead=ahead, windows=tuple(windows),
        seconds=tuple(seconds),
    )  # fmt: skip


# -- §7.1, warm-up by importance, and §7.3 (d), the split of host memory ---------------------------


class WarmUp(Executor):
    """Re-prefill, after which host memory is filled by importance.

    The question's last tokens (`SystemConfig.reprefill`) say what every cluster of every layer and
    head is worth. The best are in windows; the next best come from the SSD to host memory, while
    the first tokens are decoded and as long as there is room.
    """

    looks_up = False  # a period's scores are kept once it has selected

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.runtime)
        self._worker = worker
        self._scores: dict[int, list[Array]] = {}
        """Of each member of the batch that is to go on, by period."""
        self._jobs: list[Future[Any]] = []

    def run(self, batch: Batch, packs: Packs, trace: Trace, *, hold: bool = False) -> FirstToken:
        self._scores = {id(member): [] for member in batch.members if hold}
        try:
            first = super().run(batch, packs, trace, hold=hold)
            found = jax.device_get(self._scores)
        finally:
            self._scores = {}
        for member in batch.members if hold else ():
            if int(member.limits.max()) < member.opened.num_chunks:
                scores = np.stack(found[id(member)])  # [P, b * J, M]
                shape = len(scores), -1, self._plan.selections_per_period, scores.shape[2]
                importance = scores.reshape(shape)
                real = importance[:, member.lengths > 0, :, : member.opened.num_chunks].sum(axis=1)
                steps = self._bring(
                    member.opened.prefix, np.maximum(real, 0).reshape(-1, real.shape[2]),
                    len(batch.members),
                )  # fmt: skip
                self._jobs = [job for job in self._jobs if not job.done()]
                self._jobs.append(self._worker.add_job(steps))
        return first

    def settle(self) -> None:
        """Returns once host memory is filled."""
        for job in list(self._jobs):
            with suppress(CancelledError):
                job.result()

    def _selected(self, member: Member, period: int, selection: Selection) -> None:
        if id(member) in self._scores:
            self._scores[id(member)].append(selection.scores)

    def _bring(
        self, prefix: Prefix, importance: np.ndarray, sharers: int
    ) -> Generator[None, None, None]:
        """Fills host memory, of which `sharers` prefixes have a part each. A block a `yield`, which
        is read meanwhile. It ends early, and well, where running requests leave no room or the
        store cannot give something."""
        worker, memory, tiers = self._worker, self._memory, self._memory.tiers
        drive = worker.decoding.selections
        assert isinstance(drive, KvDriveSelections)
        stack = ExitStack()
        try:
            opened = self._prefixes.use(prefix)
            stack.callback(opened.close)
            groups = self._plan.group_table[:, 0]  # packs are of one layer
            every = np.arange(importance.shape[1])
            tiers.observe(opened.pages(groups[:, None], every).reshape(-1), importance.reshape(-1))
            room = tiers.device_slots + tiers.host_slots - tiers.device_pages - tiers.host_pages
            selection, chunk = best_packs(importance, max(0, room) // sharers, drive.stalls)
            block = max(1, memory.work_slots // 4)
            for first in range(0, len(selection), block):
                group, ids = groups[selection[first : first + block]], chunk[first : first + block]
                if memory.tiers.device.free < 2 * len(ids):
                    worker.make_way(2 * len(ids))
                with worker.packs([opened], Trace()) as packs:
                    for one in np.unique(group).tolist():
                        packs.ahead(0, one, np.sort(ids[group == one]))
                    yield
                    packs.demand(0, group, ids)
                    packs.collect(0, group, ids)
        except (PoolExhausted, RecoveryNeeded, StoreError) as error:
            _log.info("host memory is not filled to the end: %s", error)
        finally:
            stack.close()


def best_packs(
    importance: np.ndarray, count: int, stalls: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(selection, chunk) int [<= count] of the packs that host memory is filled with, best first.

    Args:
      importance: float [selections, M].
      stalls: int [selections]: each selection gets a part of `count` in proportion, and what is
        over goes by importance; without any, all does.
    """
    chunks = importance.shape[1]
    order = np.argsort(-importance, axis=None, kind="stable")
    selection, chunk = np.divmod(order, chunks)
    if stalls.any():
        share = np.minimum(chunks, count * stalls // stalls.sum())
        by_selection = np.argsort(selection, kind="stable")  # best first within each
        rank = np.empty(len(order), np.int64)
        rank[by_selection] = np.tile(np.arange(chunks), len(importance))
        order = np.argsort(rank >= share[selection], kind="stable")
        selection, chunk = selection[order], chunk[order]
    return selection[:count], chunk[:count]


KVDRIVE = in_every_layer(
    "kvdrive",
    chunk_tokens=16,
    digest="means",
    reprefill=Select(queries=32),
    policy=Policy(frequency_then_attention),
    always=Ends(),
    window=4,
    own=OwnParts(layout=clusters, executor=WarmUp, decoding=KvDriveSelections),
)
