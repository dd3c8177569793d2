"""Ledgers: exact length, answers that follow from the text."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from bench.accuracy import lengthened
from bench.workload import TEMPLATES, Example, few_shot, questions, read_examples
from bench.workload import question as worded
from ckv_jax.data import ledger as words
from ckv_jax.data.ledger import QUESTION_FAMILIES, make_ledger
from ckv_jax.data.reference import demo_document, demo_ledger, reference_folder
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.model.weights import load_pretrained
from tests.model.small import dense


def _say(ids: np.ndarray) -> str:
    return load_tokenizer(reference_folder()).decode(ids)


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
def test_every_answer_follows_from_the_text(tokens: int) -> None:
    page = make_ledger(np.random.default_rng(3), tokens)
    assert page.tokens.shape == (tokens,) and page.tokens.dtype == np.int32
    assert set(page.families) == set(range(len(QUESTION_FAMILIES)))
    document = _say(page.tokens)
    for i, answer in enumerate(page.answers):
        question = _say(page.questions[i, : page.lengths[i]])
        assert _answer(document, question) == _say([answer]).strip(), question


def test_a_longer_suffix_ends_with_the_question() -> None:
    page = make_ledger(np.random.default_rng(7), 256, questions=6)
    long = lengthened(page, 32)
    assert long.questions.shape == (6, 32) and (long.lengths == 32).all()
    for row, question, length in zip(long.questions, page.questions, page.lengths, strict=True):
        assert np.array_equal(row[32 - length :], question[:length])
        assert row[31 - length] == words.WORD_IDS["."]
    with pytest.raises(ValueError, match="got suffixes of 2 tokens"):
        lengthened(page, 2)


# -- the shipped checkpoint ------------------------------------------------------------------------


def test_the_folder_is_small_and_complete() -> None:
    files = {file.name: file.stat().st_size for file in reference_folder().iterdir()}
    assert sum(files.values()) <= 20e6
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} <= set(files)


def test_transformers_computes_the_same_logits() -> None:
    model = load_pretrained(reference_folder(), dtype="float32")
    page = demo_ledger(0, 256, questions=1)
    tokens = np.concatenate([page.tokens, page.questions[0, : page.lengths[0]]])[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        reference_folder(), dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    ours = np.asarray(jax.jit(dense)(model, jnp.asarray(tokens)))
    np.testing.assert_allclose(ours, expected, atol=2e-3 * np.abs(expected).max())


def test_a_demo_document_reads_back() -> None:
    text, asked = demo_document(1, 512, questions=20)
    page = demo_ledger(1, 512, questions=20)
    tokenizer = load_tokenizer(reference_folder())
    assert np.array_equal(tokenizer.encode(text), page.tokens)
    for (question, answer), ids, length, right in zip(
        asked, page.questions, page.lengths, page.answers, strict=True
    ):
        assert np.array_equal(tokenizer.encode(question), ids[:length])
        assert tokenizer.decode([int(right)]).strip() == answer


# -- the papers' templates -------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["[]", "{", '{"text": "no label"}', "3"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "a", "label": "b"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2"):
        read_examples(path)


@pytest.mark.parametrize("task", sorted(TEMPLATES))
def test_few_shot_prefixes_hold_every_label(task: str) -> None:
    train = [Example(text=f"text {i}", label="ab"[i % 2]) for i in range(20)]
    one, two = few_shot(task, train, shots=6, prefixes=2)
    assert one != two
    assert one.count("\n\n") == 6
    assert one == few_shot(task, train, shots=6, prefixes=2)[0]
    asked = worded(task, Example(text="what?", label="a"))
    assert "what?" in asked and asked.endswith(":")
    found = list(questions(task, train, [one, two], seed=42))
    assert len(found) == 20 and {prefix for prefix, _, _ in found} <= {one, two}
