"""What `ckv demo` does with a real model: questions about a document, answers and their sources."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckv_jax.answer import Answer, citations_json
from ckv_jax.config import EngineConfig
from ckv_jax.data.handbook import chapters
from ckv_jax.engine import Engine
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.storage.prefix import Prefix

__all__ = ["QUESTIONS", "DocumentDemo"]

QUESTIONS = (
    "How high above the sea does the observatory stand?",
    "What is the goat called?",
    "What is the nearest village?",
)
"""About the handbook that ships with the package."""
_TOKENS = 48
_SOURCES = 2


class DocumentDemo:
    """One document, stored, and questions about it: exact, and at the default budget."""

    def __init__(
        self, checkpoint: Path, *, text: str | None = None, question: str | None = None
    ) -> None:
        """`text`: None: the handbook. `question`: in place of those about the handbook."""
        self.checkpoint = checkpoint
        self.text = chapters() if text is None else text
        self.questions: Sequence[str] = QUESTIONS if question is None else (question,)

    def run(
        self,
        store: str | os.PathLike[str],
        *,
        system: str,
        ingesting: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[dict[str, Any]]:
        """What was stored, then each question with its answers, as plain values.

        Every answer is read from the store: caches are emptied before it. Each budget answers once
        before it is timed: compilation is no part of any time.
        """
        config = EngineConfig(system=system)
        with Engine.from_pretrained(self.checkpoint, store=store, config=config) as engine:
            began = time.perf_counter()
            prefix = engine.ingest(self.text, progress=ingesting)
            yield {
                "model": self.checkpoint.name,
                "prefix": prefix.id,
                "prefix_tokens": prefix.num_tokens,
                "seconds": time.perf_counter() - began,
                "store_bytes": engine.store.usage(),
            }
            budgets = (1.0, config.budget)
            for budget in budgets:
                self._ask(engine, prefix, self.questions[0], budget)
            for question in self.questions:
                answers = [self._ask(engine, prefix, question, each) for each in budgets]
                yield {"question": question, "answers": answers}

    def _ask(
        self, engine: Engine, prefix: Prefix, question: str, budget: float | str
    ) -> dict[str, Any]:
        engine.demote(prefix).result()
        began = time.perf_counter()
        sampling = SamplingParams(max_tokens=_TOKENS)
        answer: Answer = engine.ask(prefix, question, budget=budget, sampling=sampling)
        seconds = time.perf_counter() - began
        trace = answer.generation.trace
        later = sum(token.ssd_reads * token.pack_bytes for token in trace.tokens)
        passages = engine.citations(answer.generation, most=_SOURCES)
        return {
            "budget": budget,
            "text": answer.text,
            "ttft_ms": trace.ttft_ms,
            "seconds": seconds,
            "ssd_bytes": trace.bytes["ssd"] + later,
            "attention_mass": answer.coverage,
            "citations": citations_json(passages),
        }
