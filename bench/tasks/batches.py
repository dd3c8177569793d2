"""Batches for training: repeated random tokens, and ledgers with many questions each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ckv_jax.data import words
from ckv_jax.data.ledger import FAMILIES, SUFFIX_TOKENS, Ledger, make_ledger

__all__ = ["LedgerBatch", "Repeats", "ahead", "ledger_batch", "repeats", "shuffled", "stretched"]

T = TypeVar("T")
_FIRST_WORD, _END = len(words.SPECIALS) + 256, len(words.vocabulary())


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Random words that come again; `weights` is 1 where the next one follows from the past."""

    tokens: np.ndarray  # int32 [B, S]
    targets: np.ndarray  # int32 [B, S]: the next token
    weights: np.ndarray  # float32 [B, S]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerBatch:
    """B ledgers of T tokens, each with Q questions (families -1 and weight 0 where fewer)."""

    tokens: np.ndarray  # int32 [B, T]
    questions: np.ndarray  # int32 [B, Q, SUFFIX_TOKENS]
    lengths: np.ndarray  # int32 [B, Q], at least 1
    answers: np.ndarray  # int32 [B, Q]
    families: np.ndarray  # int32 [B, Q]
    needles: np.ndarray  # int32 [B, Q]


def repeats(rng: np.random.Generator, batch: int, tokens: int) -> Repeats:
    """Every word of the vocabulary takes part, also those that only test documents use."""
    body = rng.integers(_FIRST_WORD, _END, (batch, tokens + 1))
    period = rng.integers(tokens // 4, tokens // 2 + 1, (batch, 1))
    column = np.arange(tokens + 1)[None, :]
    body = np.take_along_axis(body, column % period, axis=1).astype(np.int32)
    weights = (column[:, 1:] > period).astype(np.float32)
    return Repeats(tokens=body[:, :-1], targets=body[:, 1:], weights=weights)


def shuffled(rng: np.random.Generator, rows: int, triples: int) -> Repeats:
    """Rows of `triples` random triples of words, in groups of 4 and more, each group twice.

    The second time a group's triples stand in another order. Half of the rows have no word in two
    triples, so that one word tells what follows it: the second and third of each triple are asked.
    In the others words are few, and only two words tell the third. Every word of the vocabulary
    takes part, also those that only test documents use.
    """
    each = [_shuffled_row(rng, triples) for _ in range(rows)]
    tokens, asked = (np.stack(part) for part in zip(*each, strict=True))
    return Repeats(
        tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=asked[:, 1:].astype(np.float32)
    )


def _shuffled_row(rng: np.random.Generator, triples: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [6 * triples], and which of them are asked."""
    order = rng.permutation(np.arange(_FIRST_WORD, _END))
    alone = 3 * triples <= len(order) and rng.random() < 0.5
    if alone:
        rows = order[: 3 * triples].reshape(triples, 3)
    else:
        pool = int(np.exp(rng.uniform(np.log(triples / 3), np.log(len(order)))))
        rows = order[rng.integers(0, pool, (triples, 3))]
    text, again = [], []
    while len(rows):
        size = int(np.exp(rng.uniform(np.log(4), np.log(triples + 1))))
        group, rows = rows[:size], rows[size:]
        text += [group, rng.permutation(group)]
        again += [np.zeros(len(group), bool), np.ones(len(group), bool)]
    tokens = np.concatenate(text).reshape(-1).astype(np.int32)
    asked = np.concatenate(again)[:, None] & (np.arange(3) >= (1 if alone else 2))
    return tokens, asked.reshape(-1)


def ledger_batch(
    rng: np.random.Generator,
    batch: int,
    tokens: int,
    questions: int,
    *,
    split: str = "train",
    families: tuple[str, ...] = FAMILIES,
    asked: tuple[str, ...] = FAMILIES,
    max_density: float = 1.0,
) -> LedgerBatch:
    """Ledgers of mixed density, from half of `max_density` upwards; only `asked` are asked."""
    pages = [
        make_ledger(
            rng, tokens, split=split, questions=questions, families=families,
            asked=asked, density=max_density * rng.uniform(0.5, 1.0),
        )
        for _ in range(batch)
    ]  # fmt: skip
    return stack(pages, questions)


def stretched(rng: np.random.Generator, tokens: int, end: int) -> np.ndarray:
    """Ascending positions int32 [tokens] below `end` with up to eight gaps.

    Half of them without: a short text that stands like a long one teaches far distances at the
    price of near ones (PoSE, arXiv 2309.10400).
    """
    steps = np.ones(tokens, np.int64)
    steps[0] = 0
    if end > tokens and rng.random() < 0.5:
        gaps = rng.integers(1, tokens, rng.integers(1, 9))
        spare = rng.integers(0, end - tokens)
        np.add.at(steps, gaps, rng.multinomial(spare, np.full(len(gaps), 1 / len(gaps))))
    return steps.cumsum().astype(np.int32)


def stack(pages: list[Ledger], questions: int) -> LedgerBatch:
    """Ledgers of one length as a batch with `questions` rows each."""
    shape = (len(pages), questions)
    asked = np.zeros((*shape, SUFFIX_TOKENS), np.int32)
    lengths, answers, needles = np.ones(shape, np.int32), *np.zeros((2, *shape), np.int32)
    families = np.full(shape, -1, np.int32)
    for i, page in enumerate(pages):
        count = len(page.answers)
        asked[i, :count], lengths[i, :count] = page.questions, page.lengths
        answers[i, :count], families[i, :count] = page.answers, page.families
        needles[i, :count] = page.needles
    return LedgerBatch(
        tokens=np.stack([page.tokens for page in pages]), questions=asked, lengths=lengths,
        answers=answers, families=families, needles=needles,
    )  # fmt: skip


def ahead(make: Callable[[int], T], first: int, depth: int = 2) -> Iterator[T]:
    """`make(first)`, `make(first + 1)`, … with `depth` of them made in advance by one thread."""
    with ThreadPoolExecutor(1) as pool:
        queue = [pool.submit(make, first + i) for i in range(depth)]
        step = first + depth
        while True:
            queue.append(pool.submit(make, step))
            step += 1
            yield queue.pop(0).result()
