"""What the rows of a decode batch attend to, chosen anew token by token (KVDrive §5, §6.1).

Before each period the newest tokens' queries score every row's prefix, in one call for all that fit
into one (`asking.py`), which also finds what of a choice its row's window lacks and what makes room
for it. While later calls still score, the packs that the earlier ones lack are read; the period's
layers then run once for the whole batch. Windows and the order of all this change when bytes
arrive, never what is attended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array
from jaxtyping import Int32

from ckv_jax.buckets import batch_bucket, choice_bucket
from ckv_jax.cache.window import KEEP
from ckv_jax.cache.window import Window as WindowArrays
from ckv_jax.config import SystemConfig
from ckv_jax.memory.memory import Memory
from ckv_jax.pipeline.asking import Asking, Call, in_calls
from ckv_jax.pipeline.choice_calls import ChoiceCalls, Chosen
from ckv_jax.pipeline.chooser import Chooser
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.prefix_rows import PrefixRows, by_prefix
from ckv_jax.pipeline.window import Window
from ckv_jax.pipeline.windows import Moving, Windows
from ckv_jax.reads.packs import Packs
from ckv_jax.reads.resident import Resident
from ckv_jax.reads.residents import Residents
from ckv_jax.reads.source import Source
from ckv_jax.selection.base import Selection
from ckv_jax.selection.two_stages import Rule
from ckv_jax.token_trace import TokenTrace
from ckv_jax.trace import Trace


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
        self._plan = plan
        self._select = system.decode
        self._keep = KEEP[system.keep]
        self._slots = max(1.0, system.window)
        self._keeps = system.window > 0
        self._groups = [period.groups for period in plan.by_period]
        self._each = system.heads_apart
        self._zones = system.zones
        self._sequential = system.sequential
        self._near = system.overfetch
        self._residents = residents
        self._memory = memory
        self._open_packs = open_packs
        self._rows: dict[int, Chooser] = {}
        self._prefixes: list[PrefixRows] | None = None
        self._windows: Windows | None = None
        self._which = np.zeros(0, np.int64)
        """The prefix of each row, by its place among the batch's."""
        self._on_device: dict[int, WindowArrays] = {}
        """Period -> windows of all rows [B, W], or of all heads of each [B*K, W]."""
        self._n = 0
        self._packs: Packs | None = None
        self._guesses: list[Call] | None = None
        self._chose: list[Call] = []
        """What chose for the period under way, to be recorded."""
        self._trace = Trace()
        self._step = 0

    def rows_are(self, rows: dict[int, Chooser]) -> None:
        """The batch's rows by their places; their windows may have been resized."""
        self.rest()
        self._rows = rows
        self._prefixes = None

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
        for chooser in self._rows.values():
            chooser.told = TokenTrace(pack_bytes=chooser.window.resident.prefix.layout.pack_bytes)

    def choose(
        self, period: int, hidden: Array, starts: Int32[np.ndarray, " B"],
        lengths: Int32[np.ndarray, " B"],
    ) -> None:  # fmt: skip
        """Chooses for a period of the token whose hidden states [B, 1, E] enter it, and brings
        what is missing.

        `starts`: positions of the tokens; `lengths`: tokens in each row's buffers before them.
        """
        if self._prefixes is None:
            self._begin_rows(len(starts))
        guesses, self._guesses = self._guesses, None
        asked = self._asked(period, hidden, starts, lengths) if guesses is None else guesses
        if self._select.guessed and period + 1 < self._plan.periods:
            self._guesses = self._asked(period + 1, hidden, starts, lengths)
        hidden.block_until_ready()
        ready = time.perf_counter_ns()
        try:
            if guesses is None:
                self._demand_all(period, asked)
            selected = time.perf_counter_ns()
            self._residents.record_used(self._groups[period], _selections(asked))
            self._collect(asked)
            self._chose = asked
            if self._keeps:
                self._on_device[period] = asked[-1].chosen.window
        except BaseException:
            self._fail()
            raise
        self._tell(ready, selected, time.perf_counter_ns())

    def ahead(self, period: int) -> None:
        """Starts reads while a period's layers compute: of what the next period chose, where it is
        guessed (`Select.guessed`), and of what this token nearly chose, which the next one may
        choose. Then notes what was chosen, which no call waits for."""
        try:
            chose, self._chose = self._chose, []
            if self._guesses is not None:
                self._demand_all(period + 1, self._guesses)
            if self._near > 1:
                self._read_near_misses(chose, period)
            self._record(chose, period)
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
            chooser.told.attention_mass = float(np.mean([*chooser.masses.values()] or 1.0))
        self._memory.trim()
        self._memory.flush()

    def _fail(self) -> None:
        """A token is not finished: what the device knows of windows is not what they hold."""
        self._prefixes = None
        self._guesses = None
        self._chose = []
        self.rest()

    def _asked(
        self, period: int, hidden: Array, starts: np.ndarray, lengths: np.ndarray
    ) -> list[Call]:
        """The calls that choose for a period, dispatched."""
        layers = self._plan.scoring_layers(period, self._select.score_layers)
        asking = [
            Asking(which, on, lengths[on.rows], self._plan.parts)
            for which, on in enumerate(self._prefixes or ())
        ]
        for one in asking:
            self._scored_by(one, period, layers)
        window, calls = self._on_device[period], []
        for some in in_calls(asking):
            chosen = self._ask(some, period, layers, hidden, starts, lengths, window)
            window = chosen.window
            calls.append(Call(chosen, some))
        return calls

    def _scored_by(self, one: Asking, period: int, layers: Sequence[int]) -> None:
        """Finds the probes of a prefix, and whether they are scored in two stages."""
        probes, coarse = one.on.choosers[0].probes, self._select.coarse
        one.probes = probes.get(layers, period)
        if coarse is not None:
            one.stages = coarse.stages(one.on.limits, one.on.resident.num_chunks)
        if one.stages is not None:
            one.rough = probes.rough([layers[i] for i in one.stages.coarse.layers(len(layers))])

    def _demand_all(self, period: int, asked: list[Call]) -> None:
        """Starts reading what windows lack, as soon as each call has chosen."""
        for call in asked if self._sequential else ():
            _ = call.outcome
        for call in asked:
            self._demand(call, period)

    def _begin_rows(self, batch: int) -> None:
        """Tells the device what the windows of so many rows hold."""
        self._prefixes = by_prefix(self._rows, self._near)
        self._which = np.zeros(batch, np.int64)
        for which, on in enumerate(self._prefixes):
            self._which[on.rows[: len(on.choosers)]] = which
        self._n = choice_bucket(max(int(on.near.max()) for on in self._prefixes))
        widest = max(int(chooser.widths(self._slots).max()) for chooser in self._rows.values())
        self._windows = Windows(
            {place: chooser.window for place, chooser in self._rows.items()},
            self._memory, self._plan,
            rows=batch, count=self._n, slots=max(self._n, choice_bucket(widest)),
        )  # fmt: skip
        for period in range(self._plan.periods):
            state = self._windows.state(self._plan.choices_of(period))
            self._on_device[period] = WindowArrays(*map(jax.device_put, state))

    def _ask(
        self, call: Sequence[Asking], period: int, layers: Sequence[int], hidden: Array,
        starts: np.ndarray, lengths: np.ndarray, window: WindowArrays,
    ) -> Chosen:  # fmt: skip
        """Asks in one call; there are as many prefixes in it as a bucket has."""
        more = batch_bucket(len(call)) - len(call)

        def every(rows: Sequence[np.ndarray], rest: np.ndarray) -> np.ndarray:
            return np.concatenate([*rows, *[rest] * more])

        first = call[0]
        rows = every([one.on.rows for one in call], first.on.rows)
        nothing = np.zeros_like(first.on.limits)
        limits = every([one.on.limits for one in call], nothing)
        near = every([one.on.near for one in call], nothing)
        before = [one.on.before(period, one.parts, lengths) for one in call]
        return self._calls.choose(
            layers, hidden, rows, starts[rows], [one.of for one in call] + [first.of] * more,
            limits, near, window, self._step, every(before, before[0]),
            self._rule(first), self._keep,
        )  # fmt: skip

    def _rule(self, first: Asking) -> Rule:
        return Rule(
            n=self._n,
            chunk_tokens=first.on.resident.prefix.layout.chunk_tokens,
            peaks=self._select.peaks,
            score=self._select.score,
            stages=first.stages,
            each=self._each,
            zones=self._zones,
        )

    def _demand(self, call: Call, period: int) -> None:
        """Makes room for what the windows of a call's rows lack, and starts reading it."""
        assert self._windows is not None
        moving = call.moving(self._plan.choices_of(period))
        self._count(moving)
        if not self._windows.held:
            self._windows.rechoose(moving)
            return
        self._windows.make_way(moving)
        call.moved = moving, self._windows.lacking(moving, self._which)
        if len(call.moved[1][0]):
            self._opened().demand(*call.moved[1])

    def _collect(self, asked: Sequence[Call]) -> None:
        """Waits for what the windows of all rows lack; from then on they hold what was chosen."""
        assert self._windows is not None
        moved = [call.moved for call in asked if call.moved is not None]
        lacking = [lacks for _, lacks in moved if len(lacks[0])]
        for lacks in lacking:
            self._opened().collect(*lacks)
        if lacking:
            self._opened().keep()
        for moving, _ in moved:
            self._windows.move(moving, self._step)

    def _count(self, moving: Moving) -> None:
        """Counts where rows' packs are before anything is read."""
        assert self._windows is not None
        device, host, ssd = self._windows.found(moving).tolist()
        for place, chooser in self._rows.items():
            chooser.told.device_hits += device[place]
            chooser.told.host_hits += host[place]
            chooser.told.ssd_reads += ssd[place]

    def _tell(self, ready: int, selected: int, fetched: int) -> None:
        for chooser in self._rows.values():
            chooser.told.select_ms += (selected - ready) / 1e6
            chooser.told.fetch_ms += (fetched - selected) / 1e6

    def _opened(self) -> Packs:
        if self._packs is None:
            assert self._prefixes is not None
            sources = [on.choosers[0].source for on in self._prefixes]
            self._packs = self._open_packs(sources, self._trace)
        return self._packs

    def _read_near_misses(self, asked: Sequence[Call], period: int) -> None:
        """Starts reads of what was nearly chosen for a period, and gives up earlier ones that no
        row chose (KVDrive §6.1)."""
        for one in (one for call in asked for one in call.asking):
            for part, choice in enumerate(self._plan.choices_of(period)):
                near = one.outcome.part(part, one.parts).near_misses()
                read_near_misses(
                    self._opened, one.which, one.window, self._plan.groups(choice), near
                )

    def _record(self, asked: Sequence[Call], period: int) -> None:
        """Notes what was chosen for a period, by whom it is remembered."""
        choices = self._plan.choices_of(period)
        for one in (one for call in asked for one in call.asking):
            found = one.outcome
            for chooser, rows, length in one.choosing():
                chooser.masses[period] = np.asarray(found.selection.mass[rows])
                if chooser.remembers:
                    chooser.remember(period, length, found.own[rows].copy())
                if chooser.recorded is not None:
                    scores = np.array(found.selection.scores[rows])
                    for choice, ids, given in zip(choices, found.ids[rows], scores, strict=True):
                        chooser.recorded.add(choice, ids[ids >= 0], given)
            one.on.resident.latest[period] = found.ids.reshape(-1, one.parts, found.ids.shape[1])
        self._residents.observe_all(self._groups[period], _selections(asked))


def _selections(asked: Sequence[Call]) -> list[tuple[Resident, Selection]]:
    """Each prefix that was asked, with what its rows chose."""
    every = [one for call in asked for one in call.asking]
    return [(one.on.resident, one.outcome.selection) for one in every]


def read_near_misses(
    packs: Callable[[], Packs],
    which: int,
    window: Window,
    groups: Sequence[int],
    chunks: np.ndarray,
) -> None:
    """Reads chunks int [n] of a choice's layer groups, in `packs()`, into memory for reads on their
    way and never into a window's slot; earlier such reads are given up.

    `which`: the prefix; `window`: of one of its rows.
    """
    if not window.held:
        return  # its packs come through the pool, which has no room to spare
    for group in groups:
        device, host = window.lookup(group, chunks)
        absent = chunks[(device < 0) & (host < 0)]
        packs().only_ahead(which, group, absent)
        if len(absent):
            packs().ahead(which, group, absent, apart=True)
