"""The demo of `ckv demo`: one long text, several budgets, and the cost and accuracy of each.

With a real model: questions about a document, their answers and the passages these stand on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

import numpy as np
from scipy.special import log_softmax

from ckv_jax.answer import answer_json, citations_json
from ckv_jax.config import EngineConfig
from ckv_jax.data.handbook import chapters
from ckv_jax.data.reference import demo_document, random_checkpoint, reference_folder
from ckv_jax.engine import Engine
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Request, Result
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.tools.inspect import inspect_store
from ckv_jax.user_cache import cache_folder

BUDGETS = (0.05, 0.10, 0.25, 0.50, 1.0)
SHOWN = 3
"""Questions that are shown with their answers."""
NOISE = (
    "No checkpoint was given: these weights are random, and their answers are noise. For answers "
    "that mean something: hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir "
    "Qwen2.5-0.5B-Instruct, then --checkpoint Qwen2.5-0.5B-Instruct"
)
"""For a user who gave no model, so that `demo_checkpoint` stands in."""
_RECIPE = "random-1"  # the name of a cached checkpoint changes with the way it is made
QUESTIONS = (
    "How high above the sea does the observatory stand?",
    "What is the goat called?",
    "What is the nearest village?",
)
"""About the handbook that ships with the package."""
_TOKENS = 48
_SOURCES = 2
_COMPARED = 5  # questions that are also answered by the dense prefill


def demo_checkpoint() -> Path:
    """The folder of a small checkpoint that needs no network; made in the cache at first use."""
    return random_checkpoint(cache_folder() / _RECIPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The task of the packaged checkpoint: a document of facts, questions and their answers."""

    text: str
    questions: list[tuple[str, str | None]]
    """Question and, where it is known, the first word of the right answer."""

    @classmethod
    def prepare(cls, question: str | None = None) -> Demo:
        """The packaged questions with one-word answers, or a question of the user's own."""
        text, questions = demo_document()
        return cls(text=text, questions=[*questions] if question is None else [(question, None)])

    @property
    def known(self) -> bool:
        """Whether the right answers are known."""
        return self.questions[0][1] is not None

    @property
    def runs(self) -> int:
        """Times that each question is asked at each budget."""
        return 1 if self.known else 5

    @property
    def headline(self) -> str:
        """One line about the checkpoint's task."""
        example, _ = demo_document()[1][0]
        about = (
            f"{len(self.questions)} questions with one-word answers"
            if self.known
            else f"it answers questions such as '{example}', and any other with noise"
        )
        return f"A small checkpoint, trained to look facts up in a document; {about}."

    def run(
        self,
        store: str | os.PathLike[str],
        *,
        system: str,
        budgets: Sequence[float] = BUDGETS,
        ingesting: Callable[[int, int], None] = lambda done, total: None,
        asking: Callable[[int, int], None] = lambda done, total: None,
        answered: Callable[[Sequence[dict[str, Any]]], None] = lambda asked: None,
    ) -> dict[str, Any]:
        """Ingest the text and ask; no cache lives on between questions, so every read is cold.

        The first few questions come first, at the smallest and the largest budget; `answered` gets
        them with their answers long before all the rest is measured. Each budget answers once
        before it is timed: compilation is no part of any time.

        Returns plain values: `rows` (one a budget, as `ckv ask --json` prints it, with its
        quality), `asked` (the first few questions: `question`, `expected` and `answers` by budget),
        `recompute_ttft_ms`, `store_bytes`, `prefix_tokens` and the number of `questions`.
        """
        config = EngineConfig(system=system, device_cache_bytes=0, host_cache_bytes=0, warm_batch=0)
        with Engine.from_pretrained(reference_folder(), store=store, config=config) as engine:
            prefix = engine.ingest(self.text, raw=True, progress=ingesting)
            total = len(budgets) * (1 + len(self.questions) * self.runs)
            total += 1 + min(_COMPARED, len(self.questions))
            total += 2 * len(self.questions[:SHOWN])
            steps = iter(range(1, total + 1))

            def ask(question: str, budget: float) -> Result:
                request = Request(prefix=prefix, suffix=question, budget=budget)
                (result,) = engine.reprefill([request])
                asking(next(steps), total)
                return result

            def recompute(question: str) -> Result:
                result = engine.recompute(Request(prefix=prefix, suffix=question))
                asking(next(steps), total)
                return result

            asked: list[dict[str, Any]] = [
                {"question": question, "expected": expected, "answers": {}}
                for question, expected in self.questions[:SHOWN]
            ]
            for budget in (budgets[0], budgets[-1]):
                for one in asked:
                    one["answers"][f"{budget:g}"] = ask(one["question"], budget).text.strip()
            answered(asked)
            warm_up = self.questions[0][0]
            recompute(warm_up)
            dense = [recompute(question) for question, _ in self.questions[:_COMPARED]]
            rows = []
            for budget in budgets:
                ask(warm_up, budget)
                results = [
                    ask(question, budget)
                    for question, _ in self.questions
                    for _ in range(self.runs)
                ]
                rows.append(self._row(engine, prefix, results, dense))
            return {
                "rows": rows,
                "asked": asked,
                "recompute_ttft_ms": median_low([result.trace.ttft_ms for result in dense]),
                "store_bytes": _bytes_on_disk(engine, prefix),
                "prefix_tokens": prefix.num_tokens,
                "questions": len(self.questions),
            }

    def _row(
        self, engine: Engine, prefix: Prefix, results: Sequence[Result], dense: Sequence[Result]
    ) -> dict[str, Any]:
        """The run of median time, with quality over all questions."""
        times = [result.trace.ttft_ms for result in results]
        median = results[times.index(median_low(times))]
        row = answer_json(median, engine, prefix, model=reference_folder().name)
        firsts = results[:: self.runs]
        pairs = list(zip(firsts, dense, strict=False))
        row["kl_to_recompute"] = fmean(
            kl_divergence(full.logits, some.logits) for some, full in pairs
        )
        row["top1_agrees"] = fmean(some.token_id == full.token_id for some, full in pairs)
        if self.known:
            right = [
                result.text.strip() == answer
                for result, (_, answer) in zip(firsts, self.questions, strict=True)
            ]
            row["accuracy"] = fmean(right)
        return row


def document_demo(
    checkpoint: Path,
    store: str | os.PathLike[str],
    *,
    system: str,
    text: str | None = None,
    question: str | None = None,
    ingesting: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[dict[str, Any]]:
    """Stores a document and asks about it: what was stored, then each question with its answers,
    exact and at the default budget, as plain values.

    Every answer is read from the store: caches are emptied before it. Each budget answers once
    before it is timed: compilation is no part of any time.

    Args:
        text: None: the handbook.
        question: in place of those about the handbook.
    """
    questions = QUESTIONS if question is None else (question,)
    config = EngineConfig(system=system)
    with Engine.from_pretrained(checkpoint, store=store, config=config) as engine:
        began = time.perf_counter()
        prefix = engine.ingest(chapters() if text is None else text, progress=ingesting)
        yield {
            "model": checkpoint.name,
            "prefix": prefix.id,
            "prefix_tokens": prefix.num_tokens,
            "seconds": time.perf_counter() - began,
            "store_bytes": engine.store.usage(),
        }
        budgets = (1.0, config.budget)
        for budget in budgets:
            _answer_of(engine, prefix, questions[0], budget)
        for one in questions:
            answers = [_answer_of(engine, prefix, one, budget) for budget in budgets]
            yield {"question": one, "answers": answers}


def _answer_of(
    engine: Engine, prefix: Prefix, question: str, budget: float | str
) -> dict[str, Any]:
    engine.demote(prefix).result()
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=_TOKENS)
    answer = engine.ask(prefix, question, budget=budget, sampling=sampling)
    seconds = time.perf_counter() - began
    trace = answer.generation.trace
    later = sum(token.ssd_reads * token.pack_bytes for token in trace.tokens)
    return {
        "budget": budget,
        "text": answer.text,
        "ttft_ms": trace.ttft_ms,
        "seconds": seconds,
        "ssd_bytes": trace.bytes["ssd"] + later,
        "attention_mass": answer.coverage,
        "citations": citations_json(engine.citations(answer.generation, most=_SOURCES)),
    }


def _bytes_on_disk(engine: Engine, prefix: Prefix) -> int:
    mine = {span.segment_id for span in prefix.spans}
    return sum(part.bytes for part in inspect_store(engine.store).segments if part.id in mine)


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """KL(reference || other) in nats between the next-token distributions of two logit vectors."""
    log_p, log_q = (log_softmax(logits.astype(np.float64)) for logits in (reference, other))
    return max(0.0, float(np.sum(np.exp(log_p) * (log_p - log_q))))
