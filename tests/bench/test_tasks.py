"""Ledgers: exact length, answers that follow from the text, disjoint splits."""

from __future__ import annotations

import numpy as np
import pytest

from bench.accuracy import lengthened
from ckv_jax.data import ledger as words
from ckv_jax.data.ledger import FAMILIES, make_ledger

_TEXT = words.vocabulary()


def _say(ids: np.ndarray) -> str:
    return "".join(_TEXT[i] for i in ids).replace("▁", " ")


def _answer(document: str, question: str) -> str:
    """Answers a question by reading the document, as a person would."""
    facts = [sentence.split() for sentence in document.split(":", 1)[1].split(".")]
    ask = question.replace("?", "").split(":")[-1].split()
    look = {tuple(fact[:2]): fact[2:] for fact in facts if len(fact) == 3}
    match ask[0]:
        case "trace":
            (root,) = look["trace", ask[1]]
            return look["let", root][0]
        case "check":
            return "yes" if look["check", ask[1]][0] in words.IN_ORDER else "no"
        case "sample":
            found = {f[3] for f in facts if len(f) == 4 and f[0] == "sample" and f[2] == ask[2]}
            (label,) = found
            return label
        case _:
            return look[ask[0], ask[1]][0]


@pytest.mark.parametrize("tokens", [192, 1024])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_answer_follows_from_the_text(tokens: int, split: str) -> None:
    page = make_ledger(np.random.default_rng(3), tokens, split=split)
    assert page.tokens.shape == (tokens,) and page.tokens.dtype == np.int32
    assert set(page.families) == set(range(len(FAMILIES)))
    document = _say(page.tokens)
    for i, answer in enumerate(page.answers):
        question = _say(page.questions[i, : page.lengths[i]])
        assert _answer(document, question) == _say([answer]).strip(), question


def test_training_and_test_share_no_name_and_no_topic() -> None:
    assert not set(words.NAMES) & set(words.TEST_NAMES)
    assert not set(words.TOPICS) & set(words.TEST_TOPICS)
    held = {words.WORD_IDS[word] for word in (*words.TEST_NAMES, *words.TEST_TOPICS)}
    page = make_ledger(np.random.default_rng(5), 4096, split="train")
    assert not held & set(page.tokens.tolist())


def test_a_longer_suffix_ends_with_the_question() -> None:
    page = make_ledger(np.random.default_rng(7), 256, questions=6)
    long = lengthened(page, 32)
    assert long.questions.shape == (6, 32) and (long.lengths == 32).all()
    for row, question, length in zip(long.questions, page.questions, page.lengths, strict=True):
        assert np.array_equal(row[32 - length :], question[:length])
        assert row[31 - length] == words.WORD_IDS["."]
    with pytest.raises(ValueError, match="got suffixes of 2 tokens"):
        lengthened(page, 2)
