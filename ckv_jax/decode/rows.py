"""Rows of a decode batch that select: which of them share a call, and the calls of a period."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Int32

from ckv_jax.buckets import batch_bucket
from ckv_jax.decode.scoring import Found, Probes, Recent, Record, Scoring, SelectCall
from ckv_jax.decode.window import Keep, Window, WindowPacks
from ckv_jax.pipeline.executor import Runtime
from ckv_jax.pipeline.layers import probe_key
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.selection.base import Rule
from ckv_jax.trace import TokenTrace

_MAX_PREFIXES_PER_CALL = 16
"""Maximum number of prefixes in one call."""
NO_PAGES = np.zeros(0, np.int64)


@dataclass(eq=False)
class RowSelector:
    """Selection of one row of a decode batch: how many chunks, and by which scores."""

    limit: int
    """Chunks of a selection."""
    digest: Digest
    """What of its prefix is scored."""
    window: Window
    apart: bool = False
    """Whether it has a call of its own, also where others stand on its prefix."""
    trace: TokenTrace = field(default_factory=TokenTrace)
    """Of the latest token."""
    recent: dict[int, np.ndarray] = field(default_factory=dict)
    """Period -> scores float32 [Q, J, M] of the latest selections, see `scoring.Recent`; a batch
    has newer ones."""
    age: int = 0
    """Tokens since the latest selection; 0: the next token selects."""

    @property
    def slots(self) -> int:
        """Device slots of a window that holds one selection."""
        return self.limit * self.window.opened.groups

    def widths(self, times: float) -> np.ndarray:
        """Slots int [selections] of its windows, for `times` selections each on average."""
        slots = min(int(self.limit * times + 1e-6), self.window.opened.num_chunks)
        return np.full(len(self.window.kept.ids), slots)


@dataclass(slots=True)
class PrefixRows:
    """Rows of a decode batch that select among the chunks of one prefix."""

    which: int
    """Its place among the batch's prefixes."""
    selectors: list[RowSelector]
    rows: Int32[np.ndarray, " b"]
    """A bucket of places in the batch; those past the selectors' are padding."""
    limits: Int32[np.ndarray, " b"]
    """Chunks that each row selects, 0 of padding."""

    @property
    def opened(self) -> OpenPrefix:
        """The prefix."""
        return self.selectors[0].window.opened


def by_prefix(rows: dict[int, RowSelector]) -> list[PrefixRows]:
    """The selecting rows of a batch, by their places, each with the others of its prefix."""
    found: dict[Hashable, list[int]] = {}
    for place, selector in sorted(rows.items()):
        key = id(selector.window.opened), place if selector.apart else None
        found.setdefault(key, []).append(place)
    prefixes = []
    for which, places in enumerate(found.values()):
        selectors = [rows[place] for place in places]
        padding = [0] * (batch_bucket(len(places)) - len(places))
        limits = [*(selector.limit for selector in selectors), *padding]
        mine = np.array([[*places, *padding], limits], np.int32)
        prefixes.append(PrefixRows(which, selectors, *mine))
    return prefixes


@dataclass(slots=True)
class Call:
    """One call that selects for a period: of one prefix, or of several with a row each."""

    period: int
    of: SelectCall
    recent: Recent
    """As before the token, until it is finished: it may have to begin again."""
    rows: np.ndarray
    """int [k]: the rows of its record that select, all J of each batch row."""
    place: np.ndarray
    """int [k]: the batch row of each, and its selection (`Plan.selections`)."""
    selection: np.ndarray
    found: Found | None = None
    after: Recent | None = None
    """What `recent` becomes."""
    record: Record | None = None
    """Of `rows` alone."""
    came: tuple[np.ndarray, ...] = ()
    """(row, selection, window slot, chunk) int [m] each of what windows lacked; none: of
    nothing."""
    pinned: np.ndarray = field(default_factory=lambda: NO_PAGES)
    """Pages of those that were on the device, until windows have them."""
    away: WindowPacks | None = None
    """Packs of the others."""
    wanted: tuple[np.ndarray, ...] = ()
    """(prefix, layer group, chunk) of these, each once, and where each of `away` is among them."""
    back: np.ndarray = field(default_factory=lambda: NO_PAGES)


def calls_of(
    scoring: Scoring, runtime: Runtime, period: int, prefixes: Sequence[PrefixRows], rule: Rule,
    keep: Keep, selected: Int32[np.ndarray, "B selections n"],
) -> list[Call]:  # fmt: skip
    """The calls that select for a period. Prefixes with one row each and probes of equal shapes
    share a call, a prefix with several rows has one of its own.

    `rule`: of calls without a coarse pass; `selected`: the latest chunks of every row of the batch.
    """
    decode = runtime.system.decode
    assert decode is not None
    layers = runtime.plan.scoring_layers(period, decode.score_layers)
    groups: dict[tuple[Rule, Hashable], list[tuple[PrefixRows, Probes]]] = {}
    for on in prefixes:
        stages = None
        if decode.coarse is not None:
            stages = decode.coarse.stages(on.limits, on.opened.num_chunks)
        probes = tuple(on.selectors[0].digest.get(layers, period))
        key = on.which if len(on.rows) > 1 else tuple(map(probe_key, probes))
        groups.setdefault((rule._replace(stages=stages), key), []).append((on, probes))
    return [
        _call(
            scoring, runtime, period, layers, alike[first : first + _MAX_PREFIXES_PER_CALL], staged,
            keep, selected,
        )
        for (staged, _), alike in groups.items()
        for first in range(0, len(alike), _MAX_PREFIXES_PER_CALL)
    ]  # fmt: skip


def _call(
    scoring: Scoring, runtime: Runtime, period: int, layers: Sequence[int],
    some: Sequence[tuple[PrefixRows, Probes]], rule: Rule, keep: Keep, selected: np.ndarray,
) -> Call:  # fmt: skip
    """A call of these prefixes, as many as a bucket has: those past them select nothing."""
    decode, parts = runtime.system.decode, runtime.plan.parts
    assert decode is not None
    every = [*some, *[some[0]] * (batch_bucket(len(some)) - len(some))]
    places = np.concatenate([on.rows for on, _ in every])
    limits = np.concatenate([on.limits for on, _ in some])
    limits = np.pad(limits, (0, len(places) - len(limits)))
    of = scoring.call(
        layers, places, [probes for _, probes in every],
        [on.opened.prefix.num_tokens for on, _ in every],
        [on.opened.num_chunks for on, _ in every],
        limits, rule, keep,
    )  # fmt: skip
    small = ("rows", "num_tokens", "num_chunks", "limits")
    of = of._replace(**runtime.layers.put({name: getattr(of, name) for name in small}))
    selects, each = np.flatnonzero(limits), np.arange(parts)
    rows = (selects[:, None] * parts + each).reshape(-1)
    place = np.repeat(places[selects], parts)
    selection = np.tile(period * parts + each, len(selects))
    ids = np.full((len(places) * parts, rule.n), -1, np.int32)
    ids[rows] = selected[place, selection]
    earlier = decode.queries if decode.queries is not None and decode.queries > 1 else 0
    scores = np.zeros((earlier, len(ids), some[0][0].opened.probe_chunks), np.float32)
    selectors = [selector for on, _ in some for selector in on.selectors if selector.limit]
    for row, selector in zip(rows[::parts].tolist(), selectors, strict=True):
        known = selector.recent.get(period)
        if known is not None:
            scores[:, row : row + parts, : known.shape[2]] = known
    recent = Recent(*jax.device_put((scores, ids)))
    return Call(period, of, recent, rows=rows, place=place, selection=selection)
