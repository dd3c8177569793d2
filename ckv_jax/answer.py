"""An answer: for a program, and as JSON for `ckv ask`, `ckv batch` and `ckv demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckv_jax.errors import ContextOverflow
from ckv_jax.request import Generation, Result
from ckv_jax.storage.prefix import Prefix

if TYPE_CHECKING:
    from ckv_jax.citations import Citation
    from ckv_jax.engine import Engine

__all__ = ["LOW_COVERAGE", "MAX_TOKENS", "Answer", "answer_json", "citations_json", "room"]

MAX_TOKENS = 256
"""Tokens of an answer, at most, where the caller sets no bound."""
LOW_COVERAGE = 0.7
"""Share of the question's attention below which an answer is said to stand on little. On a real
model the default budget covers 0.79 to 0.87 of it with 91 to 100% of tokens as in full attention, a
budget of 10% 0.57 to 0.71 with 84 to 100% (bench/results/fidelity.json)."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one question, see `Engine.ask`."""

    text: str
    """The answer, up to its end or to the bound on its tokens."""
    coverage: float
    """Share of the question's attention that the chunks it read hold; 1.0: nothing was left out."""
    timings: Mapping[str, float]
    """Milliseconds: `queued`, `first_token`, `decode` (from the first token to the last)."""
    generation: Generation
    """All else: tokens, why it ended, what was read."""
    cite: Callable[[], tuple[Citation, ...]] = field(repr=False)
    """Finds the citations."""

    @cached_property
    def citations(self) -> tuple[Citation, ...]:
        """The passages of the document that the answer attended to most: see `Engine.citations`,
        which finds them when this is first read, while the engine is open."""
        return self.cite()

    @classmethod
    def of(
        cls,
        generation: Generation,
        cite: Callable[[], tuple[Citation, ...]],
        *,
        before_ms: float = 0.0,
    ) -> Answer:
        """`before_ms`: what finding the budget took. Raises the generation's error, if any."""
        trace = generation.trace
        return cls(
            text=generation.text.strip(),
            coverage=trace.attention_mass,
            timings={
                "queued": generation.queued_ms,
                "first_token": before_ms + trace.ttft_ms,
                "decode": generation.decode_ms,
            },
            generation=generation,
            cite=cite,
        )

    def __str__(self) -> str:
        """The text."""
        return self.text


def citations_json(citations: Iterable[Citation]) -> list[dict[str, Any]]:
    """Citations as plain values; `tokens` are the first and the one after the last."""
    return [
        {"text": one.text, "share": one.share, "tokens": [one.tokens.start, one.tokens.stop]}
        for one in citations
    ]


def room(prefix: int, question: int, limit: int) -> int:
    """Most tokens of an answer after `prefix` and `question` tokens: 256, or what fits `limit`.

    Raises `ContextOverflow` where none fits.
    """
    if (left := limit - prefix - question) < 1:
        raise ContextOverflow(
            f"got a question of {question} tokens after {prefix} stored ones, expected at most "
            f"{max(0, limit - prefix - 1)}: the model's context has room for {limit} together with "
            "the answer"
        )
    return min(MAX_TOKENS, left)


def answer_json(
    outcome: Result | Generation, engine: Engine, *prefixes: Prefix, model: str
) -> dict[str, Any]:
    """What was asked over a prefix, or over several as parts, and what came of it. Times in ms;
    bytes by where they came from.

    `attention_mass` is the share of the probe's attention on the chosen chunks, averaged over
    periods; 1 where nothing was left out; `low_coverage`: it is below `LOW_COVERAGE`. `codec` is
    what the stored KV was encoded with: a budget of 1 is exact up to that. `chunks.selected` of
    `chunks.total` were attended to, `period_chunks` of them in each period; `ssd_bytes_unused` is
    the part of `bytes.ssd` that was read ahead and not used; `recomputed_chunks` could not be read
    and were computed again. `compiled` programs were not there yet: compiling or loading them is
    part of `ttft_ms`. A generation also has its number of tokens, the time from its first token to
    its last, tokens a second in between, why it ended, and where what its tokens chose came from
    (`Trace.decode`). Over parts, `blended_tokens` were attended to as stored and
    `recomputed_tokens` computed again.
    Raises the outcome's error, if it has one.
    """
    outcome.raise_for_error()
    trace, budget = outcome.trace, outcome.request.budget
    values = {
        "system": engine.system.name,
        "model": model,
        "codec": outcome.codec,
        "budget": engine.config.budget if budget is None else budget,
        "prefix_tokens": sum(prefix.num_tokens for prefix in prefixes),
        "suffix_tokens": len(engine.encode(outcome.request.suffix)),
        "token_id": 0,
        "text": outcome.text,
        "ttft_ms": trace.ttft_ms,
        "breakdown_ms": trace.breakdown_ms,
        "bytes": {source: trace.bytes[source] for source in ("ssd", "host", "device")},
        "ssd_bytes_unused": trace.bytes["unused"],
        "recomputed_chunks": trace.recomputed_chunks,
        "compiled": trace.compiled,
        "chunks": {name: trace.chunks[name] for name in ("selected", "total")},
        "period_chunks": trace.period_chunks,
        "attention_mass": trace.attention_mass,
        "low_coverage": trace.attention_mass < LOW_COVERAGE,
    }
    if len(prefixes) > 1:
        values["blended_tokens"] = trace.blended_tokens
        values["recomputed_tokens"] = trace.recomputed_tokens
    if isinstance(outcome, Result):
        return values | {"token_id": outcome.token_id}
    later = len(outcome.token_ids) - 1
    return values | {
        "token_id": int(outcome.token_ids[0]),
        "generated_tokens": len(outcome.token_ids),
        "decode_ms": outcome.decode_ms,
        "tokens_s": 1e3 * later / outcome.decode_ms if later and outcome.decode_ms else 0.0,
        "decode": trace.decode,
        "decode_ssd_bytes": sum(token.ssd_reads * token.pack_bytes for token in trace.tokens),
        "finish_reason": outcome.finish_reason,
    }
