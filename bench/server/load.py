"""What is asked of the server, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.common import Json
from bench.random_engine import SMALL
from ckv_jax.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is measured."""

    model: ModelConfig = SMALL
    """A small one: the larger the model, the less of the time is the server's."""
    documents: int = 4
    document_tokens: int = 4096
    question_tokens: int = 16
    new_tokens: int = 32
    clients: int = 16
    seconds: float = 30.0
    """Of either way, all turns together; each disk has a third of them."""
    turns: int = 3
    alone: int = 40
    """Requests of either kind for the overhead."""
    seed: int = 0

    def to_json(self) -> Json:
        """Plain JSON values."""
        return dataclasses.asdict(self)


QUICK = Load(documents=2, document_tokens=1024, seconds=6.0, turns=2, alone=20, new_tokens=16)
FULL = Load()


@dataclass(slots=True)
class Seen:
    """What came of some requests, in seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0
    wrong: int = 0
    """Answers whose first token is another than the expected one."""
    seconds: float = 0.0

    def add(self, start: float, events: Sequence[float]) -> None:
        """One answer, by the times of its tokens."""
        self.ttft.append(events[0] - start)
        self.gaps += np.diff(events).tolist()
        self.tokens += len(events)

    def extend(self, other: Seen) -> None:
        """What came of others, at another time."""
        self.ttft += other.ttft
        self.gaps += other.gaps
        self.tokens += other.tokens
        self.errors += other.errors
        self.wrong += other.wrong
        self.seconds += other.seconds

    def row(self, way: str) -> Json:
        """One row of the result."""

        def ms(values: list[float], percent: int) -> float:
            return 1e3 * float(np.percentile(values, percent)) if values else 0.0

        return {
            "way": way,
            "answers": len(self.ttft),
            "errors": self.errors,
            "wrong": self.wrong,
            "tokens_s": self.tokens / self.seconds,
            "p50_ttft_ms": ms(self.ttft, 50),
            "p99_ttft_ms": ms(self.ttft, 99),
            "p50_gap_ms": ms(self.gaps, 50),
            "p99_gap_ms": ms(self.gaps, 99),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids, and the text of the first token that comes after them; None: whatever comes."""

    tokens: list[int]
    expected: str | None = None


class Prompts:
    """Documents in turn, each time with another question of random tokens."""

    def __init__(self, documents: Sequence[Sequence[int]], load: Load, vocab: int) -> None:
        self._documents = documents
        self._load = load
        self._rng = np.random.default_rng(load.seed)
        self._vocab = vocab
        self._turn = 0

    def next(self) -> Prompt:
        """One more."""
        self._turn += 1
        question = self._rng.integers(0, self._vocab, self._load.question_tokens)
        document = self._documents[self._turn % len(self._documents)]
        return Prompt(tokens=[*document, *question.tolist()])


class Known:
    """Prompts whose answers are known, in turn."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._turn = 0

    def next(self) -> Prompt:
        """One more."""
        self._turn += 1
        return self._prompts[self._turn % len(self._prompts)]
