"""Few-shot accuracy on labelled texts, as the papers measure it (ContiguousKV §5.1, Figure 9).

A file of `{"text", "label"}` lines is cut into examples for prefixes and questions. Questions are
drawn normally over the prefixes, each of which holds as many examples of every label. An answer is
the label whose first token the engine finds likeliest after the question: labels of one first token
cannot be told apart and are refused. A file that cannot be read has a row with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.common import Json, interval
from bench.workload import TEMPLATES, few_shot, question, questions, read_examples
from ckv_jax.config import SystemConfig
from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.request import Request

BATCH = 16
"""Questions that are asked together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a file is asked."""

    shots: int
    """Examples in a prefix."""
    prefixes: int
    questions: int
    """At most half of the file's lines."""
    seed: int = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One file as token ids."""

    name: str
    """Of its template."""
    prefixes: tuple[np.ndarray, ...]
    """int32 [T] each."""
    asked: tuple[tuple[int, np.ndarray, int], ...]
    """(prefix, suffix int32 [S], right label) of every question."""
    first_tokens: np.ndarray
    """int64 [labels]: the token that each label begins with."""


def task_of(path: Path) -> str:
    """The template that a file is named after: `sst2.jsonl`, `trec_test.jsonl`."""
    found = [name for name in TEMPLATES if path.name.lower().replace("-", "").startswith(name)]
    if not found:
        known = ", ".join(TEMPLATES)
        raise ValueError(f"got {path.name}, expected a name that begins with one of {known}")
    return found[0]


def read_task(path: Path, tokenizer: Tokenizer, size: Size) -> Task:
    """Prefixes and questions from a file. `ValueError` says what is wrong with it."""
    name, examples = task_of(path), read_examples(path)
    order = np.random.default_rng(size.seed).permutation(len(examples))
    count = min(size.questions, len(examples) // 2)
    test, train = ([examples[i] for i in part] for part in (order[:count], order[count:]))
    labels = sorted({example.label for example in train})
    if len(labels) < 2 or not test:
        raise ValueError(
            f"got {len(examples)} lines with the labels {labels} in {path}, expected two labels "
            "at least, and lines for prefixes and questions"
        )
    unknown = {example.label for example in test} - set(labels)
    if unknown:
        raise ValueError(f"got the labels {sorted(unknown)} too seldom in {path} for a prefix")
    texts = few_shot(name, train, shots=size.shots, prefixes=size.prefixes, seed=size.seed)
    places = {text: index for index, text in enumerate(texts)}
    return Task(
        name=name,
        prefixes=tuple(tokenizer.encode(text, begins=True) for text in texts),
        asked=tuple(
            (places[prefix], tokenizer.encode(text), labels.index(label))
            for prefix, text, label in questions(name, test, texts, size.seed)
        ),
        first_tokens=_first_tokens(tokenizer, question(name, test[0]), labels),
    )


def _first_tokens(tokenizer: Tokenizer, asked: str, labels: Sequence[str]) -> np.ndarray:
    """The token that each label adds to a question first."""
    before = tokenizer.encode(asked)
    found = []
    for label in labels:
        after = tokenizer.encode(f"{asked} {label}")
        if len(after) <= len(before) or (after[: len(before)] != before).any():
            raise ValueError(f"got the label {label!r}, which changes the tokens before it")
        found.append(int(after[len(before)]))
    if len(set(found)) < len(found):
        raise ValueError(f"got labels of which two begin with one token: {', '.join(labels)}")
    return np.array(found)


def ask(engine: Engine, task: Task, budget: float) -> np.ndarray:
    """Which questions are answered rightly, bool [Q]."""
    stored = [engine.ingest(tokens) for tokens in task.prefixes]
    right = np.zeros(len(task.asked), bool)
    by_prefix = sorted(range(len(task.asked)), key=lambda number: task.asked[number][0])
    for start in range(0, len(by_prefix), BATCH):
        numbers = by_prefix[start : start + BATCH]
        results = engine.reprefill(
            [
                Request(prefix=stored[prefix], suffix=suffix.tolist(), budget=budget)
                for prefix, suffix, _ in (task.asked[number] for number in numbers)
            ]
        )
        for number, result in zip(numbers, results, strict=True):
            result.raise_for_error()
            right[number] = result.logits[task.first_tokens].argmax() == task.asked[number][2]
    return right


def measure(
    engine: Engine,
    files: Sequence[Path],
    systems: Mapping[str, SystemConfig],
    budgets: Sequence[float],
    size: Size,
) -> Iterator[Json]:
    """A row for each file, system and budget, and of all files together as the task "all"."""
    tasks: list[Task] = []
    for path in files:
        try:
            task = read_task(path, engine.tokenizer, size)
            for tokens in task.prefixes:
                engine.ingest(tokens)
        except (OSError, ValueError, CkvError) as error:
            yield {"dataset": path.name, "why_skipped": f"{type(error).__name__}: {error}"}
        else:
            tasks.append(task)
    for name, system in systems.items() if tasks else ():
        everything = system.computes_all or system.own.selects == "all"
        with engine.variant(replace(engine.config, system=system)) as served:
            for budget in (1.0,) if everything else budgets:
                began, found = time.monotonic(), []
                for task in tasks:
                    found.append(ask(served, task, budget))
                    yield _row(name, system, budget, task.name, found[-1:], [task])
                yield _row(name, system, budget, "all", found, tasks)
                spent = time.monotonic() - began
                share = np.concatenate(found).mean()
                print(f"{name} at {budget:.0%}: {share:.3f} right, {spent:.0f} s", flush=True)


def _row(
    name: str,
    system: SystemConfig,
    budget: float,
    task: str,
    found: Sequence[np.ndarray],
    tasks: Sequence[Task],
) -> Json:
    right = np.concatenate(found)
    lengths = [len(tokens) for one in tasks for tokens in one.prefixes]
    return {
        "system": name,
        "budget": budget,
        "period": system.period if system.chunked else 1,
        "task": task,
        "accuracy": float(right.mean()),
        "ci95": interval(int(right.sum()), len(right)),
        "questions": len(right),
        "chance": float(np.mean([1 / len(one.first_tokens) for one in tasks])),
        "prefix_tokens": round(float(np.mean(lengths))),
    }
