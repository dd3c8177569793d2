"""Questions over several texts in some order: what has to be known of one to read the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench import bound
from ckv_jax.data import words
from ckv_jax.data.ledger import make_ledger
from ckv_jax.data.reference import LEARNED, demo_ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts in the order in which they are read, and questions over all of them."""

    texts: list[np.ndarray]
    """int32 [T] each."""
    questions: list[list[int]]
    answers: list[int]


def _id(name: str) -> int:
    return words.WORD_IDS[name]


def ledger_texts(seed: int, texts: int, tokens: int, *, questions: int = 20) -> Texts:
    """A ledger cut between sentences and put together in another order: every fact is in one text.

    For the shipped checkpoint.
    """
    rng = np.random.default_rng((seed, texts, tokens, 1))
    page = demo_ledger(seed, tokens, asked=LEARNED, questions=questions)
    ends = np.flatnonzero(page.tokens == _id(".")) + 1
    cuts = [int(ends[np.abs(ends - tokens * i // texts).argmin()]) for i in range(1, texts)]
    cut = np.split(page.tokens, cuts)
    asked = zip(page.questions, page.lengths, strict=True)
    return Texts(
        texts=[cut[i] for i in rng.permutation(texts)],
        questions=[question[:length].tolist() for question, length in asked],
        answers=page.answers.tolist(),
    )


def seam_texts(seed: int, texts: int, tokens: int) -> Texts:
    """Ledgers of which each begins with a value and ends with a name: which value is whose, their
    order decides. For the shipped checkpoint, which knows a fact by words beside each other."""
    rng = np.random.default_rng((seed, texts, tokens, 2))
    names = [_id(name) for name in rng.permutation(words.TEST_NAMES)[:texts]]
    values = [_id(value) for value in rng.permutation(words.VALUES)[:texts]]
    made = []
    for name, value in zip(names, values, strict=True):
        body = make_ledger(rng, tokens // texts - 4, questions=0).tokens.copy()
        body[np.isin(body, names)] = _id(words.FILLERS[0])  # they stand at the seams alone
        made.append(np.array([value, _id("."), *body, _id("code"), name], np.int32))
    order = rng.permutation(texts)
    return Texts(
        texts=[made[i] for i in order],
        questions=[[_id("."), _id("code"), names[i]] for i in order[:-1]],
        answers=[values[i] for i in order[1:]],
    )


def alias_texts(seed: int, texts: int, tokens: int, *, questions: int = 8) -> Texts:
    """`texts` of about `tokens` together: each alias's name has its value in an earlier one."""
    rng = np.random.default_rng((seed, texts, tokens))
    names = rng.permutation(bound.NAMES)
    room = tokens // texts
    bodies: list[list[list[int]]] = [
        [[*rng.choice(bound.FILLERS, 5).tolist(), bound.DOT] for _ in range(room // 6)]
        for _ in range(texts)
    ]
    free = [rng.permutation(len(body)).tolist() for body in bodies]
    asked, answers = [], []
    for index in range(questions):
        root, alias = names[2 * index : 2 * index + 2].tolist()
        value = int(rng.choice(bound.VALUES))
        first, second = np.sort(rng.choice(texts, 2, replace=False))
        for text, sentence in (
            (first, [bound.LET, root, value]),
            (second, [bound.TRACE, alias, root]),
        ):
            place = free[text].pop()
            bodies[text][place] = [*sentence, bound.DOT, *bodies[text][place][4:]]
        asked.append([bound.DOT, bound.TRACE, alias])
        answers.append(value)
    joined = [np.array([t for one in body for t in one], np.int32) for body in bodies]
    return Texts(texts=joined, questions=asked, answers=answers)
