"""Requests as the papers draw them: few prefixes, normally distributed use, short questions.

Synthetic prefixes are random tokens for `bench.structured` models. Real ones come from JSONL files
of `{"text": ..., "label": ...}` lines, put into the few-shot templates of the papers' tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from bench.structured import topic_tokens

TEMPLATES = MappingProxyType(
    {
        "sst2": "Review: {text}\nSentiment: {label}",
        "subj": "Input: {text}\nType: {label}",
        "trec": "Question: {text}\nType: {label}",
        "rte": "{text}\nAnswer: {label}",
    }
)
"""Few-shot templates by task; `rte` texts hold premise and question already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One labelled text."""

    text: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Prefixes and suffixes of random tokens. The same seed gives the same tokens."""

    vocab_size: int
    prefix_tokens: int
    suffix_tokens: int
    seed: int = 42

    def prefix(self, index: int) -> np.ndarray:
        """Tokens int32 [T] of one prefix."""
        rng = np.random.default_rng((self.seed, 1, index))
        return rng.integers(0, self.vocab_size, self.prefix_tokens).astype(np.int32)

    def suffix(self, index: int, prefix: int = 0) -> np.ndarray:
        """Tokens int32 [S] of one question over a prefix; each asks for a topic of its own."""
        rng = np.random.default_rng((self.seed, 2, index))
        return topic_tokens(rng, self.suffix_tokens, self.vocab_size)


class FewShot:
    """The papers' setting: few-shot prefixes from one JSONL file, questions from another.

    The same interface as `Synthetic`, over a real tokenizer.
    """

    def __init__(
        self,
        encode: Callable[[str], np.ndarray],
        *,
        task: str,
        train: Path,
        test: Path,
        shots: int,
        prefixes: int,
        seed: int = 42,
    ) -> None:
        examples = read_examples(train)
        if not examples:
            raise ValueError(f"got no examples in {train}, expected at least one")
        texts = few_shot(task, examples, shots=shots, prefixes=prefixes, seed=seed)
        self._prefixes = [encode(text) for text in texts]
        self._questions = [encode(question(task, example)) for example in read_examples(test)]
        if not self._questions:
            raise ValueError(f"got no examples in {test}, expected at least one")
        self.prefix_tokens = max(len(tokens) for tokens in self._prefixes)

    def prefix(self, index: int) -> np.ndarray:
        """Tokens int32 [T] of one prefix."""
        return self._prefixes[index]

    def suffix(self, index: int, prefix: int = 0) -> np.ndarray:
        """Tokens int32 [S] of one question, over whichever prefix; they repeat after the last."""
        return self._questions[index % len(self._questions)]


def normal_choice(rng: np.random.Generator, n: int, count: int) -> np.ndarray:
    """`count` draws from [0, n): a normal distribution around the middle, a sixth of n wide."""
    draws = np.rint(rng.normal((n - 1) / 2, max(n / 6, 1e-9), count))
    return np.clip(draws, 0, n - 1).astype(np.int64)


def read_examples(path: Path) -> list[Example]:
    """Lines of `{"text", "label"}`; `ValueError` names the line that is something else."""
    examples = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                examples.append(Example(text=str(value["text"]), label=str(value["label"])))
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{path}:{number}: got {line.strip()[:60]!r}, expected {{"text", "label"}}'
                ) from error
    return examples


def few_shot(
    task: str, train: list[Example], *, shots: int, prefixes: int, seed: int = 42
) -> list[str]:
    """Shared prefixes of `shots` examples each, drawn normally from every label (§5.1)."""
    if task not in TEMPLATES:
        raise ValueError(f"got task={task!r}, expected one of {', '.join(TEMPLATES)}")
    if not train:
        raise ValueError("got no examples to make prefixes of, expected at least one")
    labels = sorted({example.label for example in train})
    by_label = {label: [e for e in train if e.label == label] for label in labels}
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(prefixes):
        chosen = []
        for turn in range(shots):
            pool = by_label[labels[turn % len(labels)]]
            chosen.append(pool[int(normal_choice(rng, len(pool), 1)[0])])
        parts = [TEMPLATES[task].format(text=e.text, label=e.label) for e in chosen]
        texts.append("\n\n".join(parts) + "\n\n")
    return texts


def question(task: str, example: Example) -> str:
    """The suffix that asks for one example's label."""
    return TEMPLATES[task].format(text=example.text, label="").rstrip()


def questions(
    task: str, test: list[Example], prefixes: list[str], seed: int
) -> Iterator[tuple[str, str, str]]:
    """(prefix, question, label) of every test example, prefixes drawn normally."""
    rng = np.random.default_rng(seed)
    drawn = normal_choice(rng, len(prefixes), len(test))
    for example, index in zip(test, drawn.tolist(), strict=True):
        yield prefixes[index], question(task, example), example.label
