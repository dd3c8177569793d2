"""Budgets per question, at which the first token equals that of full attention with a stated
probability.

How much attention a selection covers says nothing about a single question: on real text it
separates right first tokens from wrong ones no better than a coin. The gap between the two largest
logits does: where it is small, a small error turns the token. So a question is answered at the
smallest budget first and again at the next one, until the gap is `threshold` times its expected
error; what was read stays in the caches. That error is expected to grow with how far the gap has
moved since the budget before. The threshold is set over questions whose exact answers are known, by
an upper confidence bound of the share of wrong tokens (Bates et al., arXiv 2101.02703, Theorem 1).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from ckv_jax.errors import CkvError
from ckv_jax.request import Request, Result
from ckv_jax.storage.chain import write_json
from ckv_jax.storage.prefix import Prefix
from ckv_jax.user_cache import cache_folder

if TYPE_CHECKING:
    from ckv_jax.engine import Engine

BUDGETS = (0.05, 0.1, 0.25, 0.5)
"""Budgets tried in this order, before a budget of 1."""
DEFAULT = 0.98
"""Probability of an equal first token that "auto" means."""
DOUBT = 0.1
"""Probability that a calibration's threshold is too low for its fidelity."""
LEAST_TOKENS = 512
"""Minimum tokens of a prefix whose passages serve as questions."""
_PASSAGE = 24
"""Tokens of a made-up question: a passage of the prefix begun again, which is the hardest kind."""
_BATCH = 16
_FIDELITY = re.compile(r"fidelity:(0?\.[0-9]+)")
_LARGEST_FILE = 1 << 22
MOST_QUESTIONS = 10_000
"""Maximum questions of a calibration, whose tables fit in such a file."""

_log = logging.getLogger(__name__)


class NotCalibrated(CkvError):
    """A request has a fidelity as budget, but this model and system have no calibration."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of calibration questions, for one model and system.

    All tables have a row per question and a column per budget. Raises `ValueError` otherwise.

    Attributes:
      budgets: shares of a prefix, ascending, below 1.
      gaps: logit gap between the two likeliest tokens.
      errors: difference of this gap from the gap at budget 1.
      moves: difference of this gap from the gap of the same two tokens at the budget before; 0 at
        the first.
      same: whether the likeliest token equals that of budget 1.
    """

    budgets: tuple[float, ...]
    gaps: tuple[tuple[float, ...], ...]
    errors: tuple[tuple[float, ...], ...]
    moves: tuple[tuple[float, ...], ...]
    same: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        shapes = {np.shape(rows) for rows in (self.gaps, self.errors, self.moves, self.same)}
        if not self.gaps or shapes != {(len(self.gaps), len(self.budgets))}:
            raise ValueError(f"got tables of {shapes}, expected a row of each question")
        if list(self.budgets) != sorted({*self.budgets}) or not 0 < self.budgets[0] < 1:
            raise ValueError(f"got budgets {self.budgets}, expected ascending shares below 1")

    @cached_property
    def spread(self) -> Float[np.ndarray, " b"]:
        """Root mean square of `errors` at each budget."""
        found: np.ndarray = np.maximum(np.sqrt(np.mean(np.square(self.errors), axis=0)), 1e-6)
        return found

    @cached_property
    def _fits(self) -> Float[np.ndarray, "b 2"]:
        """What an error is expected to be at each budget, base + slope * move: `spread` at the
        first, least squares at the others."""
        found, moves = [(self.spread[0], 0.0)], np.asarray(self.moves)
        for column, errors in enumerate(np.abs(self.errors).T[1:], 1):
            known = np.stack([np.ones(len(errors)), moves[:, column]], axis=1)
            found.append(np.linalg.lstsq(known, errors)[0])
        return np.maximum(found, ((1e-6, 0.0),))

    def threshold(self, fidelity: float) -> float:
        """Computes the threshold on the gap for a fidelity, in multiples of the expected error.

        A first token whose gap is above it equals that of full attention with probability
        `fidelity`, over questions like those of the calibration. This holds in nine of ten
        calibrations (`DOUBT`). Infinite where there are too few questions: 0.98 needs at least 114.
        Raises `ValueError` for a fidelity outside of (0, 1).
        """
        if not 0 < fidelity < 1:
            raise ValueError(f"got fidelity={fidelity}, expected a probability in (0, 1)")
        base, slope = self._fits.T
        ratios = np.asarray(self.gaps) / (base + slope * np.asarray(self.moves))  # [n, b]
        wrong = np.concatenate([~np.asarray(self.same), np.zeros((len(ratios), 1), bool)], axis=1)
        risk = np.zeros(len(ratios), bool)
        best, rows = math.inf, np.arange(len(ratios))
        allowed = _allowed(len(ratios), 1 - fidelity)
        # From the largest down, so that a question once wrong stays so: the risk must not rise
        # with the threshold.
        for value in np.unique(ratios)[::-1]:
            settled = np.concatenate([ratios >= value, np.ones((len(ratios), 1), bool)], axis=1)
            risk |= wrong[rows, settled.argmax(axis=1)]
            if risk.sum() > allowed:
                break
            best = float(value)
        return best if allowed >= 0 else math.inf

    def settles(
        self, logits: np.ndarray, before: np.ndarray | None, budget: float, threshold: float
    ) -> bool:
        """Whether the gap of logits float32 [V] at one of `budgets` reaches the threshold; `before`
        has the logits at the budget before."""
        base, slope = self._fits[self.budgets.index(budget)]
        return bool(gap(logits) >= threshold * (base + slope * _move(logits, before)))


def _allowed(questions: int, rate: float) -> int:
    """The most wrong answers that a true share of `rate` gives with probability `DOUBT` at most;
    -1 where even none is likelier."""
    if rate >= 1:
        return questions
    log_rate, log_rest, chance = math.log(rate), math.log1p(-rate), 0.0
    for wrong in range(questions + 1):
        ways = math.lgamma(questions + 1) - math.lgamma(wrong + 1)
        ways -= math.lgamma(questions - wrong + 1)
        chance += math.exp(ways + wrong * log_rate + (questions - wrong) * log_rest)
        if chance > DOUBT:
            return wrong - 1
    return questions


def fidelity_of(budget: float | str | None) -> float | None:
    """Returns the probability of a budget "auto" or "fidelity:P"; None for any other budget.

    Raises `ValueError` for "fidelity:" and anything but a probability.
    """
    if budget == "auto":
        return DEFAULT
    if not isinstance(budget, str) or not budget.startswith("fidelity"):
        return None
    found = _FIDELITY.fullmatch(budget)
    if found is None or not 0 < float(found[1]) < 1:
        raise ValueError(
            f"got budget={budget!r}, expected fidelity:P with a probability such as 0.95"
        )
    return float(found[1])


def gap(logits: np.ndarray) -> float:
    """Returns the difference between the two largest of logits [V]."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def _move(logits: np.ndarray, before: np.ndarray | None) -> float:
    """How much the gap of logits [V] differs from what `before` [V] has for the same two tokens."""
    if before is None:
        return 0.0
    second, first = np.argpartition(logits, -2)[-2:]
    return float(abs(logits[first] - logits[second] - (before[first] - before[second])))


class SettledBudget(NamedTuple):
    """The budget settled for one question, and the cost of settling it."""

    budget: float
    ms: float = 0.0
    """Milliseconds of the first tokens at this budget and at smaller ones."""
    ssd_bytes: int = 0
    """Bytes read for them from SSD, which stay in the engine's caches."""


class FidelityTarget(NamedTuple):
    """A calibration, and its threshold for a fidelity."""

    known: Calibration
    threshold: float


def budget_for(
    engine: Engine, prefix: Prefix, suffix: Sequence[int] | np.ndarray, fidelity: float
) -> SettledBudget:
    """Settles the smallest calibrated budget whose first token equals that of full attention with
    probability `fidelity`, or 1.0.

    Raises `NotCalibrated`, or the error of the request.
    """
    steps = _settling(prefix, suffix, target_of(engine, fidelity))
    try:
        request = next(steps)
        while True:
            request = steps.send(engine.reprefill([request])[0])
    except StopIteration as end:
        settled: SettledBudget = end.value
        return settled


async def abudget_for(
    engine: Engine, prefix: Prefix, suffix: Sequence[int] | np.ndarray, target: FidelityTarget
) -> SettledBudget:
    """`budget_for` in an event loop; cancelling it cancels the request in progress."""
    steps = _settling(prefix, suffix, target)
    try:
        request = next(steps)
        while True:
            request = steps.send((await engine.areprefill([request]))[0])
    except StopIteration as end:
        settled: SettledBudget = end.value
        return settled


def target_of(engine: Engine, fidelity: float) -> FidelityTarget:
    """Returns the threshold of a fidelity for this model and system. Raises `NotCalibrated`."""
    if (known := load(engine)) is None:
        raise NotCalibrated(
            f"no calibration of system {engine.system.name!r} with this model: run `ckv calibrate` "
            "or Engine.calibrate(prefix) once"
        )
    return FidelityTarget(known, known.threshold(fidelity))


def _settling(
    prefix: Prefix, suffix: Sequence[int] | np.ndarray, target: FidelityTarget
) -> Generator[Request, Result, SettledBudget]:
    """Yields requests at larger and larger budgets and takes their results."""
    known, threshold = target.known, target.threshold
    ms, read, before = 0.0, 0, None
    for budget in known.budgets if math.isfinite(threshold) else ():
        result = yield Request(prefix=prefix, suffix=list(suffix), budget=budget, salt=prefix.salt)
        result.raise_for_error()
        ms, read = ms + result.trace.ttft_ms, read + result.trace.bytes["ssd"]
        if known.settles(result.logits, before, budget, threshold):
            return SettledBudget(budget, ms, read)
        before = result.logits
    return SettledBudget(1.0, ms, read)


def calibrate(
    engine: Engine,
    prefixes: Sequence[Prefix],
    *,
    questions: int | Sequence[str] = 200,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Asks questions at every budget and keeps what they said, for this model and system.

    Args:
        prefixes: texts to ask about; several make the threshold depend less on one of them.
        questions: how many passages of them to begin again, drawn at random; or questions of one's
            own, each asked about every prefix, for whose kind the probability then holds.
        progress: called with the requests that are done, and all of them.

    Raises `ValueError` for a prefix of fewer than 512 tokens, and for more than `MOST_QUESTIONS`
    questions, OSError where nothing can be kept.
    """
    count = questions if isinstance(questions, int) else len(questions) * len(prefixes)
    if count > MOST_QUESTIONS:
        raise ValueError(
            f"got {count:,} questions to calibrate by, expected at most {MOST_QUESTIONS:,}"
        )
    asked: list[Request] = []
    for index, prefix in enumerate(prefixes):
        if isinstance(questions, int):
            share = questions * (index + 1) // len(prefixes) - questions * index // len(prefixes)
            suffixes = _passages(prefix, share, seed=index)
        else:
            suffixes = [engine.question(prefix, question).tolist() for question in questions]
        asked += [Request(prefix=prefix, suffix=suffix) for suffix in suffixes]
    if not asked:
        raise ValueError("got no questions to calibrate by, expected one or more")
    every, done = (*BUDGETS, 1.0), 0
    gaps, moves, tokens = (np.zeros((len(asked), len(every))) for _ in range(3))
    for first in range(0, len(asked), _BATCH):
        before: list[np.ndarray | None] = [None] * _BATCH
        for column, budget in enumerate(every):
            some = [replace(request, budget=budget) for request in asked[first : first + _BATCH]]
            for row, result in enumerate(engine.reprefill(some)):
                result.raise_for_error()
                gaps[first + row, column] = gap(result.logits)
                moves[first + row, column] = _move(result.logits, before[row])
                tokens[first + row, column] = result.token_id
                before[row] = result.logits
            done += len(some)
            if progress is not None:
                progress(done, len(every) * len(asked))
    found = Calibration(
        budgets=BUDGETS,
        gaps=_tuples(gaps[:, :-1]),
        errors=_tuples(gaps[:, :-1] - gaps[:, -1:]),
        moves=_tuples(moves[:, :-1]),
        same=_tuples(tokens[:, :-1] == tokens[:, -1:]),
    )
    _save(engine, found)
    return found


def load(engine: Engine) -> Calibration | None:
    """What `calibrate` has kept for the engine's model and system; None if nothing was.

    A file that holds anything else is left alone and logged as a warning.
    """
    path = _path(engine)
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_LARGEST_FILE))
        rows = {
            name: _tuples(np.asarray(values[name], bool if name == "same" else float))
            for name in ("gaps", "errors", "moves", "same")
        }
        return Calibration(budgets=tuple(map(float, values["budgets"])), **rows)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.warning("cannot use the calibration in %s: %s", path, error)
        return None


def _passages(prefix: Prefix, count: int, seed: int) -> list[list[int]]:
    """Passages of the prefix, but for its first chunks and its last tokens, which always take
    part."""
    tokens = prefix.tokens
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"got a prefix of {len(tokens)} tokens to calibrate by, expected at least "
            f"{LEAST_TOKENS}"
        )
    at = np.random.default_rng(seed).integers(64, len(tokens) - 64 - _PASSAGE, count)
    return [tokens[start : start + _PASSAGE].tolist() for start in at]


def _tuples(table: np.ndarray) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, table.tolist()))


def _save(engine: Engine, found: Calibration) -> None:
    write_json(_path(engine), asdict(found))


def _path(engine: Engine) -> Path:
    """Of the model, and of everything that decides what is selected and how it is stored."""
    about = re.sub(r" at 0x[0-9a-f]+", "", f"{engine.system!r} {engine.layout.hex}")
    name = hashlib.sha256(about.encode()).hexdigest()[:16]
    return cache_folder() / "calibrations" / f"{engine.fingerprint.hex}-{name}.json"
