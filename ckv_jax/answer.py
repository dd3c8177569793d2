"""Answers with citations: `Answer`, `Citation`, and their JSON for the commands.

A citation's share is the attention that a passage got beyond its attention from an unrelated
question, because some chunks get attention from every question. Attention is evidence, not proof: a
model can attend to a passage and say something else.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ckv_jax.errors import ContextOverflow
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.request import Generation, Request, Result
from ckv_jax.storage.prefix import Prefix

if TYPE_CHECKING:
    from ckv_jax.engine import Engine

MAX_TOKENS = 256
"""Default maximum number of tokens of an answer."""
LOW_COVERAGE = 0.7
"""Share of the question's attention below which an answer gets a warning. On a real model the
default budget covers 0.79 to 0.87 of it, with 91 to 100% of tokens as in full attention; a budget
of 10% covers 0.57 to 0.71, with 83 to 100% (bench/results/fidelity.json)."""

NEUTRAL = "Say something about it."
_STEP, _MOST_POINTS = 8, 4  # one reading every 8 tokens of an answer, at most 4
_AROUND = 48  # tokens in which the ends of a passage's sentences are looked for
_KEPT = 64
_END = re.compile(r"[.!?][\"”’)]*\s+|\s*\n\s*")
_AT_END = re.compile(r"[.!?][\"”’)]*\s*$")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one question, see `Engine.ask`."""

    text: str
    """The answer's text, without the white space around it."""
    coverage: float
    """Share of the question's attention that the selected chunks hold, of what is not always kept
    (`SystemConfig.always`); 1.0: nothing was left out."""
    timings: Mapping[str, float]
    """Milliseconds: `queued`, `first_token`, `decode` (from the first token to the last)."""
    generation: Generation
    """The generation: token ids, finish reason and trace."""
    cite: Callable[[], tuple[Citation, ...]] = field(repr=False)
    """Function that computes `citations`."""

    @cached_property
    def citations(self) -> tuple[Citation, ...]:
        """The passages of the document that the answer attended to most, see `Engine.citations`.

        They are computed at first use, while the engine is open.
        """
        return self.cite()

    @classmethod
    def of(
        cls,
        generation: Generation,
        cite: Callable[[], tuple[Citation, ...]],
        *,
        before_ms: float = 0.0,
    ) -> Answer:
        """Builds an answer from a generation; raises its error, if it has one.

        `before_ms`: milliseconds that it took to settle the budget.
        """
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
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """One passage of the prefix that an answer attended to."""

    text: str
    """The passage, extended to whole sentences where their ends are near."""
    share: float
    """Share of the attention, in (0, 1], beyond that of an unrelated question; all passages of the
    prefix sum to 1."""
    tokens: range
    """Positions of the attended chunks in the prefix, in tokens; `text` may cover more."""


def citations_json(citations: Iterable[Citation]) -> list[dict[str, Any]]:
    """Converts citations to JSON; `tokens` is [first, one after the last]."""
    return [
        {"text": one.text, "share": one.share, "tokens": [one.tokens.start, one.tokens.stop]}
        for one in citations
    ]


def room(prefix: int, question: int, limit: int) -> int:
    """Returns the most tokens of an answer after `prefix` and `question` tokens, within `limit`.

    At most `MAX_TOKENS`. Raises `ContextOverflow` where no token fits.
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
    """Converts the outcome of a request, over a prefix or several documents, to JSON.

    Times are in ms, bytes by source. Raises the outcome's error, if it has one.

    `attention_mass` is the share of the probe's attention that the selected chunks hold, of what is
    not always kept, averaged over periods, and 1 where nothing was left out; `low_coverage`: it is
    below `LOW_COVERAGE`. `codec` encodes the stored KV: a budget of 1 is exact up to it.
    `chunks.selected` of `chunks.total` were attended to, `period_chunks` of them in each period.
    `ssd_bytes_unused` is the part of `bytes.ssd` that was prefetched and not used.
    `recomputed_chunks` could not be read and were recomputed. `compiled` programs were compiled or
    loaded, which is part of `ttft_ms`. A generation also has its number of tokens, the time from
    its first token to its last, its tokens per second, its finish reason, and the sources of its
    packs (`Trace.decode`). Over several documents, `blended_tokens` were used as stored and
    `recomputed_tokens` were recomputed.
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


Reprefill = Callable[[list[Request]], list[Result]]


class CitationFinder:
    """Finds the citations of generations by short re-prefills of one engine. Thread-safe.

    Args:
        tokenizer: None: there are no citations.
        question: (prefix, text) -> token ids of a question about the prefix.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, question: Callable[[Prefix, str], np.ndarray]
    ) -> None:
        self._tokenizer = tokenizer
        self._question = question
        self._drawn: OrderedDict[tuple[str, str, float | str], np.ndarray] = OrderedDict()
        self._lock = Lock()

    def of(self, generation: Generation, most: int, reprefill: Reprefill) -> tuple[Citation, ...]:
        """Returns at most `most` passages, the one with the largest share first.

        Empty over several documents, over a prefix of one chunk, where the system scores no chunks,
        and where the prefix leaves no room for an unrelated question. Raises the error of the
        generation or of a re-prefill.
        """
        answer = generation.completion()
        prefix = answer.prefix
        if self._tokenizer is None or answer.documents or prefix.num_chunks < 2 or most < 1:
            return ()
        attention = partial(
            _attention, reprefill, prefix, budget=answer.budget, salt=generation.request.salt
        )
        drawn = self._drawn_to(prefix, answer.budget, attention)
        if drawn is None:
            return ()
        gained = np.zeros_like(drawn)
        count = len(answer.token_ids)
        points = min(_MOST_POINTS, -(-count // _STEP))
        for point in range(1, points + 1):
            said = answer.token_ids[: round(count * point / points)]
            suffix = np.concatenate([answer.suffix, said])
            found = attention(suffix)
            if found is not None:
                gained += np.maximum(found - drawn, 0.0)
        if not gained.any():
            return ()
        return self._passages(prefix, gained / gained.sum(), most)

    def _drawn_to(
        self,
        prefix: Prefix,
        budget: float | str,
        attention: Callable[[np.ndarray], np.ndarray | None],
    ) -> np.ndarray | None:
        """Returns the attention on each chunk from an unrelated question; caches it."""
        key = prefix.id, prefix.salt, budget
        with self._lock:
            found = self._drawn.get(key)
        if found is None:
            try:
                found = attention(self._question(prefix, NEUTRAL))
            except ContextOverflow:
                return None
            if found is None:
                return None
            with self._lock:
                self._drawn[key] = found
                while len(self._drawn) > _KEPT:
                    self._drawn.popitem(last=False)
        return found

    def _passages(self, prefix: Prefix, shares: np.ndarray, most: int) -> tuple[Citation, ...]:
        size = prefix.layout.chunk_tokens
        spans: list[tuple[int, int]] = []
        for chunk in np.argsort(-shares, kind="stable")[: 2 * most].tolist():
            beside = sorted(span for span in spans if chunk in (span[0] - 1, span[1]))
            if beside:
                first, last = min(chunk, beside[0][0]), max(chunk + 1, beside[-1][1])
                spans[spans.index(beside[0])] = first, last
                spans = [span for span in spans if span not in beside[1:]]
            elif len(spans) < most and shares[chunk] > 0:
                spans.append((chunk, chunk + 1))
        found: dict[str, Citation] = {}
        for first, last in spans:
            tokens = range(first * size, min(last * size, prefix.num_tokens))
            text, share = self._text(prefix, tokens), float(shares[first:last].sum())
            if text in found:
                tokens, share = found[text].tokens, share + found[text].share
            found[text] = Citation(text=text, share=share, tokens=tokens)
        return tuple(sorted(found.values(), key=lambda one: -one.share))

    def _text(self, prefix: Prefix, tokens: range) -> str:
        """Returns the sentences around some tokens."""
        assert self._tokenizer is not None
        ids = prefix.tokens
        decode = self._tokenizer.decode
        before, inside, after = (
            decode(part, skip_special=True).replace("\ufffd", "")
            for part in (
                ids[max(0, tokens.start - _AROUND) : tokens.start],
                ids[tokens.start : tokens.stop],
                ids[tokens.stop : tokens.stop + _AROUND],
            )
        )
        ends = [match.end() for match in _END.finditer(before)]
        begin = before[ends[-1] :] if ends else before[-len(before) // 2 :]
        end = _END.search(after)
        rest = after[: end.end()] if end is not None else after[: len(after) // 2]
        if _AT_END.search(inside):
            rest = ""
        return " ".join(f"{begin}{inside}{rest}".split())


def _attention(
    reprefill: Reprefill,
    prefix: Prefix,
    suffix: np.ndarray,
    *,
    budget: float | str,
    salt: str | None,
) -> np.ndarray | None:
    """Computes the chunks' shares of the attention, float64 [M], with 0 for the first chunk, which
    is the attention sink of every query."""
    request = Request(
        prefix=prefix, suffix=suffix.tolist(), budget=budget, attention=True, salt=salt
    )
    (result,) = reprefill([request])
    if result.attention is None or len(result.attention) != prefix.num_chunks:
        return None
    shares = result.attention.astype(np.float64)
    shares[0] = 0.0
    found: np.ndarray = shares / max(float(shares.sum()), np.finfo(np.float64).tiny)
    return found
