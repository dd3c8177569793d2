"""Fidelity to full attention: exact at budget 1, and bad input."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from bench import fidelity
from bench.fidelity import least_kl, main, summary_rows
from bench.fidelity_tasks import (
    MANUAL,
    continuations,
    extractions,
    name_of,
    needles,
    read_text,
    recalls,
)
from ckv_jax.data.reference import random_checkpoint
from ckv_jax.errors import CheckpointError
from ckv_jax.model.sampling import logprobs
from ckv_jax.model.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "ckv_jax" / "data" / "handbook.txt"
GREEDY = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fidelity") / "model"
    return random_checkpoint(folder, num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of `greedy` is short here."""
    monkeypatch.setattr(fidelity, "GREEDY_TOKENS", GREEDY)


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
    with pytest.raises(ValueError, match="got prefixes of 248 tokens, expected at least 249"):
        recalls("t", tokens, 248, 5, np.array([7], np.int32))
    assert len(recalls("t", tokens, 249, 5, np.array([7], np.int32)).questions) == 5


def test_texts_are_files_also_gzipped_or_parts_of_the_manual(tmp_path: Path) -> None:
    packed = tmp_path / "handbook.txt.gz"
    packed.write_bytes(gzip.compress(TEXT.read_bytes()))
    assert read_text(packed) == read_text(TEXT) == TEXT.read_text()
    assert name_of(packed) == name_of(TEXT) == "handbook"
    for name in MANUAL:
        assert len(read_text(Path(name))) > 10_000 and name_of(Path(name)) == name


def test_budget_one_is_full_attention_and_bad_input_leaves_the_rest(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, one_class = tmp_path / "short.txt", tmp_path / "trec.jsonl"
    short.write_text("Too short a text.")
    lines = [{"text": f"room {i}", "label": "only"} for i in range(20)]
    one_class.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "fidelity.json"
    rows = rows_of(
        out, "--model", str(checkpoint), "--texts", str(TEXT), str(short), "--dataset",
        str(one_class), "--systems", "ckv", "as-h2o-lfu", "--budgets", "1.0", "0.1",
        "--tokens", "1200", "--questions", "4", "--tasks", "continuation", "recall", "facts",
        "greedy", "--greedy", "1",
    )  # fmt: skip
    skipped = {
        (row["task"], row["text"]) for row in rows if "why_skipped" in row and "system" not in row
    }
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
    greedy = {row["budget"]: row for row in rows if "kl_per_token" in row}
    whole, part = greedy[1.0], greedy[0.1]
    assert whole["same_tokens"] == whole["tokens"] == part["tokens"] == GREEDY
    assert whole["agree_per_token"] == 1.0 and abs(whole["kl_per_token"]) < 1e-6
    assert part["same_tokens"] <= GREEDY and part["kl_per_token"] > 0
    facts = {row["budget"]: row for row in rows if "f1" in row}
    assert set(facts) == {1.0, 0.1} and facts[1.0]["f1"] == facts[1.0]["f1_full"]
    assert len(summary_rows(rows)) == 8
    assert {row.get("selected", 1.0) for row in rows if row.get("budget") == 1.0} == {1.0}
    printed = capsys.readouterr().out
    assert "is left out: got" in printed and "kl_per_token" in printed and "f1_full" in printed


def rows_of(out: Path, *argv: str) -> list[dict[str, Any]]:
    """The rows of a run that left out a text or a data set."""
    with pytest.raises(SystemExit) as left:
        main([*argv, "--json", str(out)])
    assert left.value.code == 3
    found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return found


def test_what_cannot_be_measured_is_said_and_the_rest_is_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, cut, alike = (tmp_path / name for name in ("book.txt.gz", "cut.gz", "subj.jsonl"))
    packed.write_bytes(gzip.compress(TEXT.read_bytes()))
    cut.write_bytes(packed.read_bytes()[:100])
    lines = [{"text": f"room {i}", "label": ("room", "room two")[i % 2]} for i in range(40)]
    alike.write_text("\n".join(map(json.dumps, lines)))
    rows = rows_of(
        tmp_path / "fidelity.json", "--model", str(checkpoint), "--texts", str(packed), str(cut),
        str(tmp_path), str(tmp_path / "none.txt"), "--dataset", str(alike),
        str(tmp_path / "sst2.jsonl"), "--systems", "contiguous-kv", "as-h2o-lfu", "--budgets",
        "0.1", "mass:0.8", "--tokens", "600", "--questions", "4", "--tasks", "recall", "greedy",
        "--greedy", "1",
    )  # fmt: skip
    why = {row["text"]: row["why_skipped"] for row in rows if "system" not in row}
    assert set(why) == {"cut", tmp_path.name, "none", "subj.jsonl", "sst2.jsonl"}
    assert "No such file" in why["none"] and "No such file" in why["sst2.jsonl"]
    assert "two begin with one token" in why["subj.jsonl"]
    made = {(row["task"], row["system"], row["budget"]): row for row in rows if "system" in row}
    assert len(made) == 2 * 2 * 2
    by_mass = made["recall", "contiguous-kv", "mass:0.8"]
    assert by_mass["covered_least"] >= 0.8 and 0 < by_mass["selected"] < 1
    assert made["recall", "as-h2o-lfu", 0.1]["selected"] == pytest.approx(0.1, abs=0.01)
    for budget in (0.1, "mass:0.8"):
        assert made["greedy", "contiguous-kv", budget]["tokens"] == GREEDY
        assert "first tokens only" in made["greedy", "as-h2o-lfu", budget]["why_skipped"]
    assert "selects tokens" in made["recall", "as-h2o-lfu", "mass:0.8"]["why_skipped"]
    printed = capsys.readouterr().out
    assert printed.count("as-h2o-lfu computes first tokens only") == 1
    assert {"packs", "selected", "mass:0.8"} <= set(printed.split())
    out = tmp_path / "nothing.json"
    with pytest.raises(SystemExit):
        main(["--model", str(checkpoint), "--texts", str(cut), "--json", str(out)])
    assert not out.exists()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--tasks", "recal"], "invalid choice: 'recal'"),
        (["--tasks", "few-shot"], "without --dataset"),
        (["--texts", "a/one.txt", "b/one.txt.gz"], "two files named one"),
        (["--budgets", "auto"], "got budget auto"),
        (["--budgets", "fidelity:0.98"], "got budget fidelity:0.98"),
        (["--budgets", "mass:2"], "got budget='mass:2'"),
    ],
)
def test_wrong_arguments_are_refused(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2 and why in capsys.readouterr().err.splitlines()[-1]


def test_without_the_model_it_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise CheckpointError("cannot fetch the model")

    monkeypatch.setattr(fidelity, "fetch", missing)
    for argv in ([], ["--model", str(tmp_path / "none")]):
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert isinstance(left.value.code, str) and len(left.value.code.splitlines()) == 1


def test_kl_of_the_likeliest_tokens_is_at_most_the_whole() -> None:
    logits = np.random.default_rng(0).normal(scale=3.0, size=(2, 200)).astype(np.float32)
    one, other = log_softmax(logits, axis=1)
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
    rows = rows_of(
        tmp_path / "fidelity.json", "--model", str(small), "--texts", str(TEXT), "--systems",
        "ckv", "--budgets", "0.1", "--tokens", "570", "--questions", "2", "--tasks", "recall",
        "continuation",
    )  # fmt: skip
    kept, left = sorted(rows, key=lambda row: "why_skipped" in row)
    assert kept["task"] == "recall" and left["task"] == "continuation"
    assert "got 602 tokens in handbook, expected at most 600" in left["why_skipped"]
