"""Fidelity to full attention: exact at budget 1, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.fidelity import least_kl, log_softmax, main, summary_rows
from bench.fidelity_tasks import (
    continuations,
    extractions,
    needles,
    read_texts,
    recalls,
)
from ckv_jax.data.reference import random_checkpoint
from ckv_jax.model.sampling import logprobs
from ckv_jax.model.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "ckv_jax" / "data" / "handbook.txt"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fidelity") / "model"
    return random_checkpoint(folder, num_layers=4, hidden_size=64, num_heads=2, num_kv_heads=1)


def test_tasks_are_made_of_the_text_itself(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    tokens = np.asarray(tokenizer.encode(TEXT.read_text()), np.int32)
    goes_on = continuations("t", tokens, 400, 3)
    for i, question in enumerate(goes_on.questions):
        at = 400 + 32 * i
        assert question.suffix.tolist() == tokens[at : at + 32].tolist()
        assert question.truth == tokens[at + 32]
    again = recalls("t", tokens, 400, 5, np.array([7], np.int32))
    for question in again.questions:
        passage = [*question.suffix[1:].tolist(), question.truth]
        places = range(400 - len(passage) + 1)
        assert any(tokens[p : p + len(passage)].tolist() == passage for p in places)
    facts = needles("t", tokens, 1200, tokenizer)
    assert len(facts.prefix) == 1200 and len(facts.questions) == 12
    tables = extractions("t", tokens, 1200, tokenizer)
    text = tokenizer.decode(tables.prefix)
    assert len(tables.prefix) == 1200 and all(len(rows) == 11 for rows in tables.rows)
    for question, rows in zip(tables.questions, tables.rows, strict=True):
        begun = tokenizer.decode(question.suffix)
        assert "\n".join(rows) in text and begun.splitlines()[-1] + "\n" + rows[0] in text
    with pytest.raises(ValueError, match="got prefixes of 30 tokens, expected more than"):
        extractions("t", tokens, 30, tokenizer)
    with pytest.raises(ValueError, match="expected at least 433"):
        continuations("short", tokens[:410], 400, 3)
    assert set(read_texts([])) == {"python-types", "python-names", "python-strings"}


def test_budget_one_is_full_attention_and_bad_input_leaves_the_rest(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, one_class = tmp_path / "short.txt", tmp_path / "trec.jsonl"
    short.write_text("Too short a text.")
    lines = [{"text": f"room {i}", "label": "only"} for i in range(20)]
    one_class.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "fidelity.json"
    main(
        [
            "--model", str(checkpoint), "--texts", str(TEXT), str(short), "--dataset",
            str(one_class), "--systems", "ckv", "as-h2o-lfu", "--budgets", "1.0", "0.1",
            "--tokens", "1200", "--questions", "4", "--tasks", "continuation", "recall", "facts",
            "greedy", "--greedy", "1", "--json", str(out),
        ]
    )  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    skipped = {(row["task"], row["text"]) for row in rows if "why_skipped" in row}
    assert skipped == {
        ("continuation", "short"),
        ("recall", "short"),
        ("facts", "short"),
        ("trec", "trec.jsonl"),
    }
    measured = [row for row in rows if "kl" in row]
    assert len(measured) == 2 * 2 * 2
    for row in measured:
        if row["budget"] == 1.0:
            assert row["kl"] < 1e-6 and row["agree"] == 1.0 and row["kept"] == row["right_full"]
        else:
            assert row["kl"] > 0 and row["bytes"] > 0 and row["reads"] > 0
    greedy = {row["budget"]: row for row in rows if row["task"] == "greedy"}
    whole, part = greedy[1.0], greedy[0.1]
    assert whole["same_tokens"] == whole["tokens"] == part["tokens"] == 128
    assert whole["agree_per_token"] == 1.0 and abs(whole["kl_per_token"]) < 1e-6
    assert part["same_tokens"] <= 128 and part["kl_per_token"] > 0
    facts = {row["budget"]: row for row in rows if "f1" in row}
    assert set(facts) == {1.0, 0.1} and facts[1.0]["f1"] == facts[1.0]["f1_full"]
    assert len(summary_rows(rows)) == 8
    assert "is left out: got" in capsys.readouterr().out


def test_kl_of_the_likeliest_tokens_is_at_most_the_whole() -> None:
    logits = np.random.default_rng(0).normal(scale=3.0, size=(2, 200)).astype(np.float32)
    one, other = log_softmax(logits)
    whole = float((np.exp(one) * (one - other)).sum())
    few, all_of_them = ([logprobs(row, 0, count) for row in logits] for count in (20, 200))
    assert 0 < least_kl(*few) < whole
    assert least_kl(*all_of_them) == pytest.approx(whole, rel=1e-4)


def test_a_context_that_is_too_long_is_left_out(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    small = tmp_path / "small"
    shutil.copytree(checkpoint, small)
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 600}))
    out = tmp_path / "fidelity.json"
    main(
        [
            "--model", str(small), "--texts", str(TEXT), "--systems", "ckv", "--budgets", "0.1",
            "--tokens", "570", "--questions", "2", "--tasks", "recall", "continuation",
            "--json", str(out),
        ]
    )  # fmt: skip
    kept, left = sorted(json.loads(out.read_text())["rows"], key=lambda row: "why_skipped" in row)
    assert kept["task"] == "recall" and left["task"] == "continuation"
    assert "got 602 tokens in handbook, expected at most 600" in left["why_skipped"]
