"""Citations: the passages of a stored document that an answer attended to most.

Attention is evidence of reading, not proof: a model can look at a passage and say something else.
Some chunks draw attention whatever is said. So a passage counts by what it got beyond what a
question about nothing draws to it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np

from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.request import Generation, Request, Result
from ckv_jax.storage.prefix import Prefix

__all__ = ["Citation", "Citations"]

NEUTRAL = "Say something about it."
_STEP, _MOST_POINTS = 8, 4  # an answer is read at each of so many tokens, in at most so many places
_AROUND = 48  # tokens in which the ends of a passage's sentences are looked for
_KEPT = 64
_END = re.compile(r"[.!?][\"”’)]*\s+|\s*\n\s*")
_AT_END = re.compile(r"[.!?][\"”’)]*\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """One passage."""

    text: str
    """Whole sentences where their ends are near."""
    share: float
    """Of what all passages got beyond what a question about nothing draws."""
    tokens: range
    """Of the prefix: the chunks that got it, fewer than the text has."""


Reprefill = Callable[[list[Request]], list[Result]]


class Citations:
    """Finds citations, by short re-prefills of one engine. Thread-safe.

    Args:
        tokenizer: None: nothing is cited.
        question: (prefix, text) -> token ids of a question about it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, question: Callable[[Prefix, str], np.ndarray]
    ) -> None:
        self._tokenizer = tokenizer
        self._question = question
        self._drawn: OrderedDict[tuple[str, str, float | str], np.ndarray] = OrderedDict()
        self._lock = Lock()

    def of(self, generation: Generation, most: int, reprefill: Reprefill) -> tuple[Citation, ...]:
        """At most so many passages, those with the largest share first.

        Empty over several documents, over a prefix of one chunk, and where the system scores no
        chunks. Raises the generation's error, and what is wrong with a re-prefill.
        """
        answer = generation.completion()
        prefix = answer.prefix
        if self._tokenizer is None or answer.parts or prefix.num_chunks < 2 or most < 1:
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
        """What a question about nothing draws to each chunk."""
        key = prefix.id, prefix.salt, budget
        with self._lock:
            found = self._drawn.get(key)
        if found is None:
            found = attention(self._question(prefix, NEUTRAL))
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
            beside = [span for span in spans if chunk in (span[0] - 1, span[1])]
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
        """The sentences around some tokens."""
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
    """Shares of the chunks float64 [M], the first apart: it is every query's sink."""
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
