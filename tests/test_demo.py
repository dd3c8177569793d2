"""The demo: the checkpoint made on the spot, and what it reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_line import Here

from ckv_jax.data.handbook import chapters, handbook
from ckv_jax.data.reference import demo_document, random_checkpoint
from ckv_jax.data.smollm2 import FILE
from ckv_jax.demo import QUESTIONS, SHOWN, Demo
from ckv_jax.errors import CheckpointError, CkvError
from ckv_jax.model.tokenizer import load_tokenizer

FACTS = ("1,148 metres", "Parallax", "Ostrava Green")
"""What answers `QUESTIONS`."""


def test_a_checkpoint_is_made_once_and_whole(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "made", num_layers=2, hidden_size=64)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert random_checkpoint(folder, num_layers=2, hidden_size=64) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(handbook())) == handbook()
    chat = tokenizer.apply_chat([{"role": "user", "content": "What is the goat called?"}])
    assert chat.endswith("<|im_start|>assistant\n")


@pytest.mark.slow
def test_the_demo_reports_every_budget(tmp_path: Path) -> None:
    made = Demo.prepare()
    assert len(made.questions) == 50
    text, questions = demo_document(1, 480, questions=4)  # longer ones compile for longer
    made = replace(made, text=text, questions=questions)
    first: list[object] = []
    report = made.run(
        tmp_path / "store", system="contiguous-kv", budgets=(0.25, 1.0), answered=first.extend
    )
    assert first == report["asked"]
    files = (tmp_path / "store" / "segments").rglob("*")
    assert report["store_bytes"] == sum(file.stat().st_size for file in files if file.is_file())
    assert [row["budget"] for row in report["rows"]] == [0.25, 1.0]
    assert 0 < report["rows"][0]["bytes"]["ssd"] < report["rows"][1]["bytes"]["ssd"]
    assert report["rows"][-1]["kl_to_recompute"] < 1e-3
    assert report["rows"][-1]["accuracy"] >= 0.75  # of four, all KV in attention
    assert all(4 * row["accuracy"] in range(5) for row in report["rows"])
    assert report["rows"][-1]["top1_agrees"] == 1
    assert [one["question"] for one in report["asked"]] == [q for q, _ in questions[:SHOWN]]
    shown = [one["answers"]["1"] == one["expected"] for one in report["asked"]]
    assert sum(shown) >= 2  # of three, all KV in attention
    assert all(set(one["answers"]) == {"0.25", "1"} for one in report["asked"])


@pytest.mark.parametrize(
    ("installed", "fetched", "fails", "says"),
    [
        (True, True, False, "Next: "),
        (True, False, False, ""),
        (True, True, True, "make"),
        (False, True, True, "pip failed, for the reason above; it needs the network\n"),
    ],
)
def test_make_demo_names_the_next_step_only_if_that_can_be_taken(
    tmp_path: Path, installed: bool, fetched: bool, fails: bool, says: str
) -> None:
    """`ckv demo` succeeds without a network, too: with the toy model."""
    commands = {
        "python": f'[ "$2" != pip ] || exit 1\nexec {sys.executable} "$@"',
        "ckv": f"exit {int(fails)}",
    }
    (tmp_path / "bin").mkdir()
    for name, lines in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    if installed:
        (tmp_path / ".installed").touch()
    if fetched:
        model = tmp_path / "ckv_jax" / "models" / FILE
        model.parent.mkdir(parents=True)
        model.touch()
    done = subprocess.run(
        ["make", "demo", f"VENV={tmp_path}"],
        cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode != 0) == fails
    assert done.stderr.startswith(says) and bool(done.stderr) == bool(says)


def test_the_quickstart_shows_what_the_demo_asks() -> None:
    page = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text("utf-8")
    asked = set(re.findall(r'ckv ask \$model "(.+?)"', page))
    assert asked & set(QUESTIONS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model_answers_about_the_handbook(
    smollm2: Path, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch, optimised: None
) -> None:
    paragraphs = chapters().split("\n\n")  # those that the questions are about, and a few others
    about = [one for one in paragraphs if re.search("|".join(FACTS), one)]
    monkeypatch.setattr("ckv_jax.demo.chapters", lambda: "\n\n".join(paragraphs[:5] + about))
    monkeypatch.setattr("ckv_jax.data.smollm2.fetch", lambda cache: smollm2)
    code, out, err = here("demo", "--cache", tmp_path, "--json")
    assert code == 0 and "SmolLM2" in err
    report = json.loads(out)
    assert report["model"] == smollm2.name and report["prefix_tokens"] > 500
    assert [one["question"] for one in report["asked"]] == list(QUESTIONS)
    cited = 0
    for one, fact in zip(report["asked"], FACTS, strict=True):
        exact, sparse = one["answers"]
        assert (exact["budget"], exact["attention_mass"]) == (1.0, 1.0)
        assert fact in exact["text"]
        cited += fact in exact["citations"][0]["text"]
        assert 0 < sparse["ssd_bytes"] < exact["ssd_bytes"] <= report["store_bytes"]
        assert sparse["citations"] and sparse["attention_mass"] < 1
    assert cited >= 2  # the goat's name ends the sentence before what is said of it


@pytest.mark.slow
def test_without_the_index_the_shipped_checkpoint_answers(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Mock(side_effect=CheckpointError("cannot fetch it: no route"))
    monkeypatch.setattr("ckv_jax.data.smollm2.fetch", refused)
    monkeypatch.setattr(Demo, "run", Mock(side_effect=CkvError("ran")))
    for more, why in (((), "cannot fetch it: no route"), (("--shipped",), "")):
        code, out, err = here("demo", "--cache", tmp_path, *more)
        assert code == 1 and err == "ckv: ran\n"
        assert out.count("using the packaged toy checkpoint") == bool(why)
        assert why in out and "trained to look facts up" in out


def test_a_cache_that_cannot_be_written_does_not_end_the_demo(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mock(side_effect=CkvError("ran"))
    monkeypatch.setattr(Demo, "run", run)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    code, out, err = here("demo", "--cache", tmp_path / "file" / "cache")
    assert (code, err) == (1, "ckv: ran\n")
    assert "using the packaged toy checkpoint: cannot fetch" in out
    assert run.call_args.args[0].parent == tmp_path


def test_a_question_of_ones_own_goes_to_the_trained_checkpoint(here: Here, tmp_path: Path) -> None:
    made = Demo.prepare("code rupert")
    assert made.questions == [("code rupert", None)]
    assert "questions such as 'now tell me: code rupert', and any other with noise" in made.headline
    (tmp_path / "own.txt").write_text("a text of one's own")
    code, _, err = here("demo", "--shipped", "--text", tmp_path / "own.txt", "--cache", tmp_path)
    assert code == 1 and "reads only its own ledger" in err


def test_a_question_that_looks_like_markup_is_shown_as_it_is(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"question": "code [/x]", "expected": None, "answers": {"0.05": "[b]", "1": "lamp"}}

    def run(*_: object, answered: Callable[[list[object]], None], **__: object) -> None:
        answered([asked])
        raise CkvError("ran")

    monkeypatch.setattr(Demo, "run", run)
    code, out, err = here("demo", "--shipped", "--question", "code [/x]", "--cache", tmp_path)
    assert (code, err) == (1, "ckv: ran\n")
    assert "code [/x]" in out and "[b]" in out
