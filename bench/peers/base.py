"""The interface of a peer: its questions, and its answers with times."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.common import Json, summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A prefix and what is asked about it."""

    tokens: np.ndarray
    """int32 [T]."""
    suffixes: tuple[np.ndarray, ...]
    """int32 [S] each."""
    answers: np.ndarray | None = None
    """int32 [Q]: the token that is right after each; None for a model that knows nothing."""
    text: np.ndarray | None = None
    """int32 [N], N >= 2: what every answer goes on with, whatever the model makes of it; None:
    first tokens alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint, and the pages that every peer is asked about."""

    name: str
    folder: Path
    """The checkpoint, in HF format."""
    pages: tuple[Page, ...]
    recomputes: int
    """Questions of a page that are also asked where everything is computed for each."""

    @property
    def longest(self) -> int:
        """Tokens of the longest suffix."""
        return max(len(suffix) for page in self.pages for suffix in page.suffixes)

    @property
    def text(self) -> int:
        """Tokens of the longest text that answers go on with."""
        return max(len(page.text) if page.text is not None else 0 for page in self.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One first token."""

    token: int
    ms: float
    """Wall clock, from the question to the token."""
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    """What of it went where, if the peer can tell."""
    token_ms: float | None = None
    """Wall clock of each of the N - 1 tokens after the first of a page's `text`, mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of answering over a prefix that is held."""

    ask: Callable[[np.ndarray], Answer]
    kept: float = 1.0
    """Share of the prefix's keys and values that may take part."""
    most: int | None = None
    """Questions of a page that it is asked; None: all."""
    prefill_ms: float | None = None
    """Wall clock of computing and keeping the page's prefix; None: it is not kept, or not timed."""


Held = Mapping[str, Way | str]
"""Ways by what they do; in place of one that does not work, why."""
Holder = Callable[[Page], Held]
"""Takes a page's prefix and lets go of the one before."""


class Peer(Protocol):
    """A program that answers questions over long prefixes."""

    packages: tuple[str, ...]
    """What has to be importable."""
    install: str
    """The command that makes it so."""

    def open(self, case: Case, work: Path) -> AbstractContextManager[Holder]:
        """Loads the checkpoint; files go to `work`. Raises `NotForThis` where it has no part."""
        ...


class NotForThis(Exception):
    """Why a peer takes no part in a case."""


@dataclass(slots=True, kw_only=True)
class _Taken:
    """What one way gave over all pages."""

    kept: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    further: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    right: list[bool] = field(default_factory=list)
    failed: str | None = None


def missing(peer: Peer) -> str | None:
    """Why a peer cannot run here: what is not installed, or does not import."""
    for package in peer.packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed: {peer.install}"
        except Exception as error:  # other people's code, built for another version of something
            return f"{package} does not import: {_reason(error)}"
    return None


def compare(case: Case, peers: Mapping[str, Peer], work: Path) -> list[Json]:
    """A row for every way of every peer; one row with a reason for a peer that has none."""
    reasons: dict[str, str] = {}
    taken: dict[tuple[str, str], _Taken] = {}
    with ExitStack() as stack:
        holders: dict[str, Holder] = {}
        for name, peer in peers.items():
            reason = missing(peer)
            try:
                if reason is None:
                    holders[name] = stack.enter_context(peer.open(case, work))
            except NotForThis as error:
                reason = str(error)
            except Exception as error:  # whatever it is, the others go on
                reason = _reason(error)
            if reason is not None:
                reasons[name] = reason
        for page in case.pages:
            _ask(page, _held(page, holders, reasons, taken), taken)
    rows = [_row(case, *key, one) for key, one in taken.items()]
    return rows + [
        _described(case, name) | {"why_skipped": reason} for name, reason in reasons.items()
    ]


def _held(
    page: Page,
    holders: dict[str, Holder],
    reasons: dict[str, str],
    taken: dict[tuple[str, str], _Taken],
) -> dict[tuple[str, str], Way]:
    """Every way over one page; a peer that cannot hold it is left out from there on."""
    ways: dict[tuple[str, str], Way] = {}
    for name in list(holders):
        try:
            offered = holders[name](page)
        except Exception as error:
            del holders[name]
            before = [one for (other, _), one in taken.items() if other == name]
            for one in before:  # figures of fewer pages than the others' are none
                one.failed = one.failed or _reason(error)
            if not before:
                reasons[name] = _reason(error)
            continue
        for what, way in offered.items():
            one = taken.setdefault((name, what), _Taken())
            if isinstance(way, str):
                one.failed = one.failed or way
            else:
                ways[name, what] = way
    return ways


def _ask(
    page: Page, ways: Mapping[tuple[str, str], Way], taken: Mapping[tuple[str, str], _Taken]
) -> None:
    """Every question to every way, after one that is not counted: the ways take turns, and in a
    turn each is asked another question, so that none profits from what the one before it did.

    A way's last question is the one that it is also asked first, uncounted.
    """
    count = len(page.suffixes)
    apart = max(1, count // len(ways)) if ways else 1
    first = {key: -number * apart % count for number, key in enumerate(ways)}
    for key, way in ways.items():
        taken[key].kept.append(way.kept)
        if way.prefill_ms is not None:
            taken[key].prefills.append(way.prefill_ms)
        if way.most is None:
            _answered(page, (first[key] - 1) % count, way, _Taken(), taken[key])
    for turn in range(count):
        for key, way in ways.items():
            one = taken[key]
            if one.failed is None and (way.most is None or turn < way.most):
                _answered(page, (first[key] + turn) % count, way, one, one)


def _answered(page: Page, number: int, way: Way, to: _Taken, failed: _Taken) -> None:
    """One question, noted in `to`; what goes wrong in `failed`."""
    try:
        answer = way.ask(page.suffixes[number])
    except Exception as error:
        failed.failed = _reason(error)
        return
    to.times.append(answer.ms)
    if answer.token_ms is not None:
        to.further.append(answer.token_ms)
    for part, ms in answer.parts_ms.items():
        to.parts.setdefault(part, []).append(ms)
    if page.answers is not None:
        to.right.append(answer.token == int(page.answers[number]))


def _described(case: Case, name: str) -> Json:
    return {
        "case": case.name,
        "peer": name,
        "what": None,
        "tokens": max(len(page.tokens) for page in case.pages),
        "suffix_tokens": case.longest,
    }


def _row(case: Case, name: str, what: str, one: _Taken) -> Json:
    """One way's figures; none where it failed on the way."""
    row = _described(case, name) | {"what": what, "why_skipped": one.failed}
    if one.failed is not None:
        return row
    return row | {
        "kept": statistics.fmean(one.kept),
        "prefill_ms": summary(one.prefills) if one.prefills else None,
        "ttft_ms": summary(one.times),
        "token_ms": summary(one.further) if one.further else None,
        "parts_ms": {part: statistics.median(times) for part, times in one.parts.items()},
        "right": sum(one.right) if one.right else None,
        "questions": len(one.right) if one.right else None,
    }


def _reason(error: Exception) -> str:
    first = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(error).__name__}: {first[:300]}"
