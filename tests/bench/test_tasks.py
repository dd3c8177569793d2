"""Ledgers: exact length, answers that follow from the text, disjoint splits, stable seeds."""

from __future__ import annotations

import numpy as np
import pytest

from bench.tasks import tokenizer
from bench.tasks.batches import ledger_batch, repeats, shuffled, stretched
from ckv_jax.data import words
from ckv_jax.data.ledger import FAMILIES, SUFFIX_TOKENS, make_ledger

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


@pytest.mark.parametrize("family", range(len(FAMILIES)))
def test_needles_hold_the_fact(family: int) -> None:
    page = make_ledger(np.random.default_rng(4), 512)
    mine = np.flatnonzero(page.families == family)
    needle = page.tokens[page.needles[mine]]
    if FAMILIES[family] == "verify":
        good = np.isin(needle, [words.WORD_IDS[word] for word in words.IN_ORDER])
        assert np.array_equal(good, page.answers[mine] == words.WORD_IDS["yes"])
    else:
        assert np.array_equal(needle, page.answers[mine])


def test_a_variable_is_set_before_it_is_traced() -> None:
    page = make_ledger(np.random.default_rng(11), 1024, families=("tracking",))
    facts = [sentence.split() for sentence in _say(page.tokens).split(".")]
    kinds = [(fact[0], fact[-1] if fact[0] == "trace" else fact[1]) for fact in facts if fact]
    traced = [i for i, (kind, _) in enumerate(kinds) if kind == "trace"]
    assert traced and all(kinds.index(("let", kinds[i][1])) < i for i in traced)


def test_training_and_test_share_no_name_and_no_topic() -> None:
    assert not set(words.NAMES) & set(words.TEST_NAMES)
    assert not set(words.TOPICS) & set(words.TEST_TOPICS)
    held = {words.WORD_IDS[word] for word in (*words.TEST_NAMES, *words.TEST_TOPICS)}
    page = make_ledger(np.random.default_rng(5), 4096, split="train")
    assert not held & set(page.tokens.tolist())


def test_the_seed_decides_the_batch() -> None:
    batches = [ledger_batch(np.random.default_rng(6), 2, 256, 12) for _ in range(2)]
    for name in batches[0].__slots__:
        assert np.array_equal(getattr(batches[0], name), getattr(batches[1], name))
    assert batches[0].questions.shape == (2, 12, SUFFIX_TOKENS)
    other = ledger_batch(np.random.default_rng(7), 2, 256, 12)
    assert not np.array_equal(batches[0].tokens, other.tokens)


def test_repeats_can_be_predicted_from_the_past() -> None:
    text = repeats(np.random.default_rng(8), 16, 48)
    for row, target, weight in zip(text.tokens, text.targets, text.weights, strict=True):
        for i in np.flatnonzero(weight):
            earlier = np.flatnonzero(row[:i] == row[i])
            assert target[i] in row[earlier + 1]


@pytest.mark.parametrize("seed", range(6))
def test_shuffled_triples_can_be_predicted_from_the_past(seed: int) -> None:
    text = shuffled(np.random.default_rng(seed), 3, 40)
    assert text.tokens.shape == (3, 239)
    for row, target, weight in zip(text.tokens, text.targets, text.weights, strict=True):
        assert weight[:11].sum() == 0
        alone = len(set(row)) >= 119
        assert weight.sum() == (80 if alone else 40)
        for i in np.flatnonzero(weight):
            if alone:
                before = np.flatnonzero(row[:i] == row[i])[-1:]
            else:
                before = np.flatnonzero((row[: i - 1] == row[i - 1]) & (row[1:i] == row[i])) + 1
            assert target[i] in row[before + 1]


def test_stretched_positions_ascend_and_stay_below_the_end() -> None:
    rng = np.random.default_rng(12)
    rows = [stretched(rng, 64, 256) for _ in range(20)]
    assert all((np.diff(row) >= 1).all() and row[0] == 0 and row[-1] < 256 for row in rows)
    assert 2 <= sum(row[-1] == 63 for row in rows) <= 18
    assert np.array_equal(stretched(rng, 64, 0), np.arange(64))


def test_only_what_is_asked_is_asked() -> None:
    page = make_ledger(np.random.default_rng(13), 512, asked=("verify",))
    assert set(page.families) == {FAMILIES.index("verify")}
    assert words.WORD_IDS["trace"] in page.tokens
    with pytest.raises(ValueError, match="got families"):
        make_ledger(np.random.default_rng(13), 512, asked=("verfy",))


def test_questions_are_spread_over_the_families() -> None:
    page = make_ledger(np.random.default_rng(9), 4096, questions=50)
    assert np.array_equal(np.bincount(page.families, minlength=5), [10] * 5)


def test_bad_arguments_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="got split 'dev'"):
        make_ledger(rng, 256, split="dev")
    with pytest.raises(ValueError, match="got families"):
        make_ledger(rng, 256, families=("recal",))
    with pytest.raises(ValueError, match="got 40 tokens"):
        make_ledger(rng, 40)


def test_the_tokenizer_keeps_ids_and_reads_any_text() -> None:
    reader = tokenizer.build()
    assert [reader.id_to_token(i) for i in range(len(_TEXT))] == _TEXT
    page = make_ledger(np.random.default_rng(10), 512)
    for ids in (page.tokens, page.questions[0, : page.lengths[0]]):
        assert reader.encode(reader.decode(ids.tolist())).ids == ids.tolist()
    odd = 'Grüße!  Two spaces,\nπ ≈ 3.14 and "Wörter" 😀'
    assert reader.decode(reader.encode(odd).ids) == odd
