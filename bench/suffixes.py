"""Longer suffixes: a question that comes after some sentences, or many questions answered."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ckv_jax.data import words
from ckv_jax.data.ledger import Ledger

__all__ = ["Told", "lengthened", "retold", "told"]

_FILLERS = np.array([words.WORD_IDS[word] for word in words.FILLERS], np.int32)
_DOT = np.int32(words.WORD_IDS["."])
_SENTENCE = 6  # words and full stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Token sequences to feed one by one, and what should be said after some of the tokens."""

    tokens: np.ndarray
    """int32 [S, T]."""
    wanted: np.ndarray
    """int32 [S, T], the right next token; -1 where nothing was asked."""


def told(page: Ledger) -> Told:
    """Suffixes of one length as they are: the answer is wanted after the last token.

    Raises ValueError for suffixes of different lengths.
    """
    if (page.lengths != page.questions.shape[1]).any():
        raise ValueError("got suffixes of different lengths, expected one (`lengthened`)")
    wanted = np.full_like(page.questions, -1)
    wanted[:, -1] = page.answers
    return Told(tokens=page.questions, wanted=wanted)


def retold(page: Ledger, sequences: int, tokens: int, seed: int = 0) -> Told:
    """Questions of the page with their right answers, one after the other, cut at `tokens`.

    Sentences like those of the document, drawn without repeating within a sequence; every answer
    has to be looked up. Raises ValueError where the page has too few questions for that.
    """
    rng = np.random.default_rng((seed, tokens, 12))
    out = np.zeros((sequences, tokens), np.int32)
    wanted = np.full_like(out, -1)
    for row in range(sequences):
        at = 0
        for i in rng.permutation(len(page.answers)):
            if at >= tokens:
                break
            length = int(page.lengths[i])
            sentence = [*page.questions[i, :length], page.answers[i], _DOT]
            part = sentence[: tokens - at]
            out[row, at : at + len(part)] = part
            if at + length - 1 < tokens:
                wanted[row, at + length - 1] = page.answers[i]
            at += len(part)
        if at < tokens:
            raise ValueError(
                f"got {len(page.answers)} questions, expected enough for {tokens} tokens"
            )
    return Told(tokens=out, wanted=wanted)


def lengthened(page: Ledger, tokens: int, seed: int = 0) -> Ledger:
    """`page` with every suffix `tokens` long: sentences of filler words, then the question.

    The sentence before the question ends with a full stop. Raises ValueError if a question is
    longer than `tokens`.
    """
    longest = int(page.lengths.max(initial=0))
    if longest > tokens:
        raise ValueError(f"got suffixes of {tokens} tokens, expected at least {longest}")
    rng = np.random.default_rng((seed, tokens, 11))
    suffixes = rng.choice(_FILLERS, (len(page.answers), tokens))
    for row, question, length in zip(suffixes, page.questions, page.lengths, strict=True):
        row[tokens - length - 1 :: -_SENTENCE] = _DOT
        row[tokens - length :] = question[:length]
    return replace(
        page, questions=suffixes.astype(np.int32), lengths=np.full_like(page.lengths, tokens)
    )
