"""What the rows of a decode batch attend to, chosen anew token by token (KVDrive §5, §6.1).

Before each period the newest tokens' queries score every row's prefix, one call a prefix, which
also finds what of the choice its window lacks and what makes room for it. While later calls still
score, the packs that the earlier ones lack are read; the period's layers then run once for the
whole batch. Windows and the order of all this change when bytes arrive, never what is attended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jaxtyping import Int32

from ckv_jax.buckets import batch_bucket, choice_bucket
from ckv_jax.cache.window import CLOSED, KEEP
from ckv_jax.cache.window import Window as WindowArrays
from ckv_jax.config import SystemConfig
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.ahead import Guesses
from ckv_jax.pipeline.choice_calls import ChoiceCalls, Chosen, chunks_of
from ckv_jax.pipeline.chooser import Chooser
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.window import Window
from ckv_jax.reads.packs import Packs
from ckv_jax.reads.residents import Resident, Residents
from ckv_jax.reads.source import Source
from ckv_jax.selection.base import Selection
from ckv_jax.selection.chunks import attention_mass
from ckv_jax.token_trace import TokenTrace
from ckv_jax.trace import Trace


@dataclass(slots=True)
class _Member:
    """One prefix of a batch and the rows that stand on it."""

    resident: Resident
    choosers: list[Chooser]
    rows: np.ndarray
    """int32 [b], a bucket: rows of the batch, those past the choosers' are padding."""
    near: np.ndarray
    """int32 [b]: chunks of each row that are chosen or near misses."""
    n: int
    windows: dict[int, WindowArrays]
    """Period -> on the device."""


_Moving = tuple[Chooser, np.ndarray, np.ndarray, np.ndarray]
"""A row that chose: its ids, the window's slots of them, and those of them that it lacks."""


class _Asked(NamedTuple):
    """One prefix's choice for a period."""

    which: int
    member: _Member
    chosen: Chosen
    limits: np.ndarray
    queries: np.ndarray | None
    """float32 [b, n, H, D], where it matters how far they have turned (`Select.drift`)."""
    moving: list[_Moving]

    @property
    def window(self) -> Window:
        """Of one of its rows."""
        return self.member.choosers[0].window


class Choices:
    """The choosing rows of one decode batch. Engine thread only."""

    def __init__(
        self,
        calls: ChoiceCalls,
        plan: Plan,
        system: SystemConfig,
        residents: Residents,
        memory: Memory,
        *,
        open_packs: Callable[[Sequence[Source], Trace], Packs],
    ) -> None:
        """`open_packs`: the packs of some prefixes, until the batch's rows change."""
        assert system.decode is not None
        self._calls = calls
        self._peers = calls.peers
        self._plan = plan
        self._select = system.decode
        self._score = system.decode.score or attention_mass
        self._keep = KEEP[system.keep]
        self._slots = max(1.0, system.window)
        self._keeps = system.window > 0
        self._sequential = system.sequential
        self._near = system.overfetch
        self._ahead = Guesses(system.decode.ahead, system.overfetch, plan)
        self._residents = residents
        self._memory = memory
        self._open_packs = open_packs
        self._rows: dict[int, Chooser] = {}
        self._members: list[_Member] | None = None
        self._packs: Packs | None = None
        self._guesses: list[_Asked] | None = None
        self._trace = Trace()
        self._step = 0

    def rows_are(self, rows: dict[int, Chooser]) -> None:
        """The batch's rows by their places; their windows may have been resized."""
        self.rest()
        self._rows = rows
        self._members = None

    def rest(self) -> None:
        """Ends all reads, so that the batch holds nothing but its windows."""
        if self._packs is not None:
            self._packs.finish()
            self._packs = None

    def begin(self) -> None:
        """A token begins, perhaps once more after a failure."""
        self._step += 1
        self._trace = Trace()
        if self._packs is not None:
            self._packs.tell(self._trace)
        for chooser in self._rows.values() if not self._keeps else ():
            chooser.window.forget()
        if self._members is None:
            self._members = self._grouped()
        for member in self._members:
            size = member.resident.prefix.layout.pack_bytes
            for chooser in member.choosers:
                chooser.told = TokenTrace(pack_bytes=size)

    def choose(
        self, period: int, hidden: Array, starts: Int32[np.ndarray, " B"],
        lengths: Int32[np.ndarray, " B"],
    ) -> bool:  # fmt: skip
        """Chooses for a period of the token whose hidden states [B, 1, E] enter it, and brings
        what is missing; whether anything was chosen.

        `starts`: positions of the tokens; `lengths`: tokens in each row's buffers before them.
        """
        assert self._members is not None
        guesses, self._guesses = self._guesses, None
        if self._select.drift is not None:
            hidden.block_until_ready()
        ready = time.perf_counter_ns()
        asked = self._asked(period, hidden, starts, lengths) if guesses is None else guesses
        if self._select.guessed and period + 1 < self._plan.periods:
            self._guesses = self._asked(period + 1, hidden, starts, lengths)
        if self._select.drift is None:
            hidden.block_until_ready()
            ready = time.perf_counter_ns()
        try:
            with self._peers.local():
                if guesses is None:
                    self._demand_all(period, asked)
                selected = time.perf_counter_ns()
                if self._ahead.asks_after(period):
                    self._guess(period + 1, hidden, starts, lengths)
                for one in asked:  # while packs are read
                    self._record(one, period, lengths)
                for one in asked:
                    self._collect(one, period)
                    if self._keeps:
                        one.member.windows[period] = one.chosen.window
        except BaseException:
            self._fail()
            raise
        for one in asked if self._ahead.near else ():
            self._ahead.nearly(one.which, one.window, one.chosen.near_misses())
        self._tell(ready, selected, time.perf_counter_ns())
        return bool(asked)

    def ahead(self, period: int) -> None:
        """Starts reads while a period's layers compute: of what the next period chose, if it was
        told (`Select.guessed`), or else what it and the next token may choose (`ahead.py`)."""
        try:
            with self._peers.local():
                if self._guesses is not None:
                    self._demand_all(period + 1, self._guesses)
                self._ahead.start(period, self._opened)
        except BaseException:
            self._fail()
            raise

    def finish(self) -> None:
        """All calls of the token are dispatched: the caches shrink to their size."""
        counted, unused = self._trace.counters, self._trace.bytes["unused"]
        for chooser in self._rows.values():
            stored = chooser.window.resident.prefix.layout.stored_bytes
            chooser.told.recomputed += counted.get("recomputed_packs", 0)
            chooser.told.ahead += counted.get("covered", 0)
            chooser.told.unused += unused // stored
            chooser.told.attention_mass = float(np.mean(list(chooser.masses.values()) or [1.0]))
        self._memory.trim()
        self._memory.flush()

    def _fail(self) -> None:
        """A token is not finished: what the device knows of windows is not what they hold."""
        self._members = None
        self._guesses = None
        self._ahead.forget()
        self.rest()

    def _asked(
        self, period: int, hidden: Array, starts: np.ndarray, lengths: np.ndarray, *,
        guess: bool = False,
    ) -> list[_Asked]:  # fmt: skip
        """The calls that choose for a period, dispatched, of each prefix with rows that are due; or
        that only guess what it will choose."""
        asked = []
        for which, member in enumerate(self._members or ()):
            limits, queries = self._due(
                member, period, hidden, starts, lengths, self._select.drift if not guess else None
            )
            if limits.any():
                chosen = self._ask(member, period, hidden, starts, lengths, limits)
                asked.append(_Asked(which, member, chosen, limits, queries, []))
        return asked

    def _due(
        self, member: _Member, period: int, hidden: Array, starts: np.ndarray, lengths: np.ndarray,
        least: float | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
        """How much each row is to choose, int32 [b], 0 for those that need not; and their queries,
        where these decide that."""
        limits = np.zeros(len(member.rows), np.int32)
        at = lengths[member.rows].tolist()
        for row, chooser in enumerate(member.choosers):
            limits[row] = chooser.limit if chooser.due(at[row]) else 0
        if least is None or not limits.any():
            return limits, None
        layers = self._plan.scoring_layers(period, self._select.score_layers)
        queries = self._calls.queries(layers, hidden, member.rows, starts[member.rows])
        for row, chooser in enumerate(member.choosers):
            if limits[row] and not chooser.turned(period, at[row], queries[row], least):
                limits[row] = 0
        return limits, queries

    def _guess(self, period: int, hidden: Array, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Asks what a period will probably choose, while packs of the one before it are read."""
        for one in self._asked(period, hidden, starts, lengths, guess=True):
            self._ahead.next_period(one.which, one.window, one.chosen.guess)

    def _demand_all(self, period: int, asked: list[_Asked]) -> None:
        """Starts reading what windows lack, as soon as each prefix has chosen."""
        for one in asked if self._sequential else ():
            one.chosen.moves.table.block_until_ready()
        for one in asked:
            one.moving.extend(self._demand(one.which, one.member, period, one.chosen, one.limits))

    def _grouped(self) -> list[_Member]:
        by_prefix: dict[int, list[tuple[int, Chooser]]] = {}
        for place, chooser in sorted(self._rows.items()):
            by_prefix.setdefault(id(chooser.window.resident), []).append((place, chooser))
        return [self._member(rows) for rows in by_prefix.values()]

    def _member(self, rows: list[tuple[int, Chooser]]) -> _Member:
        choosers = [chooser for _, chooser in rows]
        size = batch_bucket(len(rows))
        widest = max(int(chooser.widths(self._slots).max()) for chooser in choosers)
        near = [math.ceil(chooser.limit * self._near) for chooser in choosers]
        n = choice_bucket(max(near))
        slots = max(n, choice_bucket(widest))
        windows = {}
        for period in range(self._plan.periods):
            held = np.full((3, size, slots), CLOSED, np.int32)
            for row, chooser in enumerate(choosers if choosers[0].window.held else ()):
                state = chooser.window.state(period)
                held[:, row, : len(state[0])] = state
            windows[period] = WindowArrays(*map(jax.device_put, held))
        return _Member(
            resident=choosers[0].window.resident,
            choosers=choosers,
            rows=np.array([place for place, _ in rows] + [0] * (size - len(rows)), np.int32),
            near=np.array(near + [0] * (size - len(rows)), np.int32),
            n=n,
            windows=windows,
        )

    def _ask(
        self, member: _Member, period: int, hidden: Array, starts: np.ndarray,
        lengths: np.ndarray, limits: np.ndarray,
    ) -> Chosen:  # fmt: skip
        layers = self._plan.scoring_layers(period, self._select.score_layers)
        coarse = self._select.coarse
        before = np.zeros((len(member.rows), member.resident.probe_chunks), np.float32)
        for row, chooser in enumerate(member.choosers):
            before[row] = chooser.before(period, int(lengths[member.rows[row]]))
        probes = member.choosers[0].probes
        stages = None if coarse is None else coarse.stages(limits, member.resident.num_chunks)
        asking = [] if stages is None else [layers[i] for i in stages.coarse.layers(len(layers))]
        return self._calls.choose(
            layers, hidden, member.rows, starts[member.rows],
            probes.get(layers, period), member.resident, limits,
            np.where(limits > 0, member.near, 0), member.windows[period], self._step, before,
            score=self._score, keep=self._keep, n=member.n,
            stages=stages, rough=probes.rough(asking), pool=self._select.pool,
        )  # fmt: skip

    def _demand(
        self, which: int, member: _Member, period: int, chosen: Chosen, limits: np.ndarray
    ) -> list[_Moving]:
        """Makes room for what a member's windows lack, and starts reading it."""
        ids, table, misses = map(
            np.asarray, (chosen.selection.ids, chosen.moves.table, chosen.moves.misses)
        )
        moving = []
        for row in np.flatnonzero(limits).tolist():
            chooser = member.choosers[row]
            self._look_up(chooser, period, ids[row], misses[row])
            chooser.forget(period)  # until its window is whole again
            if chooser.window.held:
                chooser.window.make_way(period, table[row], misses[row])
                moving.append((chooser, ids[row], table[row], misses[row]))
            else:
                chooser.window.rechoose(period, ids[row][ids[row] >= 0])
        missing = chunks_of([misses for _, _, _, misses in moving])
        if len(missing):
            for group in self._plan.groups(period):
                self._opened().demand(which, group, missing)
        return moving

    def _collect(self, one: _Asked, period: int) -> None:
        missing = chunks_of([misses for _, _, _, misses in one.moving])
        if len(missing):
            for group in self._plan.groups(period):
                self._opened().collect(one.which, group, missing)
            self._opened().keep(one.which)
        for chooser, ids, table, misses in one.moving:
            chooser.window.move(period, ids, table, misses, self._step)
        if one.queries is not None:  # not before: a token that fails is tried again
            for row in np.flatnonzero(one.limits).tolist():
                one.member.choosers[row].chose(period, one.queries[row])

    def _look_up(self, chooser: Chooser, period: int, ids: np.ndarray, misses: np.ndarray) -> None:
        """Counts where a row's packs are before anything is read."""
        told, window = chooser.told, chooser.window
        lacks = misses if window.held else ids
        lacks = lacks[lacks >= 0]
        groups = self._plan.groups(period)
        kept = (int((ids >= 0).sum()) - len(lacks)) * len(groups)
        told.device_hits += kept
        for group in groups if len(lacks) else ():
            device, host = window.lookup(group, lacks)
            on_device, on_host = int((device >= 0).sum()), int((host >= 0).sum())
            told.device_hits += on_device
            told.host_hits += on_host
            told.ssd_reads += len(lacks) - on_device - on_host

    def _tell(self, ready: int, selected: int, fetched: int) -> None:
        for chooser in self._rows.values():
            chooser.told.select_ms += (selected - ready) / 1e6
            chooser.told.fetch_ms += (fetched - selected) / 1e6

    def _opened(self) -> Packs:
        if self._packs is None:
            assert self._members is not None
            sources = [member.choosers[0].source for member in self._members]
            self._packs = self._open_packs(sources, self._trace)
        return self._packs

    def _record(self, one: _Asked, period: int, lengths: np.ndarray) -> None:
        member, chose = one.member, one.limits > 0
        selection: Selection = jax.tree.map(np.asarray, one.chosen.selection)
        own = np.asarray(one.chosen.own)
        for row in np.flatnonzero(chose).tolist():
            chooser = member.choosers[row]
            chooser.told.choices += 1
            chooser.masses[period] = float(selection.mass[row])
            chooser.remember(period, int(lengths[member.rows[row]]), own[row].copy())
            if chooser.recorded is not None:
                ids, scores = np.asarray(selection.ids[row]), np.array(selection.scores[row])
                chooser.recorded.add(period, ids[ids >= 0], scores)
        selection = jax.tree.map(lambda part: part[chose], selection)
        self._residents.record(member.resident, self._plan.groups(period), selection)
        member.resident.last_selection[period] = chunks_of(np.asarray(selection.ids))
