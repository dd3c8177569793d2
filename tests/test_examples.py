"""The examples run as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckv_jax.data.random_checkpoint import random_checkpoint

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small weights; a tokenizer that reads any text."""
    folder = tmp_path_factory.mktemp("examples") / "checkpoint"
    return random_checkpoint(folder, num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1)


def example(name: str, *args: object, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, args)],
        capture_output=True,
        text=True,
        input=stdin,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_questions_over_a_folder(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("The lamp is red. " * 20)
    (folder / "two.md").write_text("The lamp is green. " * 30)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    command = ("folder_questions.py", folder, "Which colour?", "--store", tmp_path / "kv")
    first = example(*command, "--checkpoint", checkpoint)
    assert len(first.splitlines()) == 2
    assert "one.txt" in first
    assert "two.md" in first
    assert example(*command, "--checkpoint", checkpoint) == first


def test_without_a_model_an_example_says_that_it_prints_noise(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("The lamp is red. " * 20)
    command = [
        sys.executable,
        str(EXAMPLES / "folder_questions.py"),
        str(tmp_path),
        "Which colour?",
    ]
    done = subprocess.run(
        [*command, "--store", str(tmp_path / "kv")],
        capture_output=True, text=True, timeout=240, check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    assert "their answers are noise" in done.stderr
    assert "hf download Qwen/Qwen2.5-0.5B-Instruct" in done.stderr
    assert "one.txt" in done.stdout


def test_a_chat_stores_its_history(checkpoint: Path, tmp_path: Path) -> None:
    out = example(
        "chat.py", "--store", tmp_path / "kv", "--checkpoint", checkpoint, "--max-tokens", 5,
        stdin="Good evening.\n\nAnd what then?\n",
    )  # fmt: skip
    stored = [int(line.split(", ")[1].split()[0]) for line in out.splitlines() if "stored]" in line]
    assert len(stored) == 2
    assert stored[1] > stored[0] > 0


def test_texts_are_classified_in_one_batch(checkpoint: Path, tmp_path: Path) -> None:
    examples = [("It shone all day.", "good"), ("It rained.", "bad")] * 8
    (tmp_path / "examples.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in examples)
    )
    texts = ["A fine morning.", "A wet evening.", "Fog."]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    out = example(
        "classify_jsonl.py", tmp_path / "texts.jsonl", "--examples", tmp_path / "examples.jsonl",
        "--store", tmp_path / "kv", "--checkpoint", checkpoint,
    )  # fmt: skip
    found = [json.loads(line) for line in out.splitlines()]
    assert [item["text"] for item in found] == texts
    assert {item["label"] for item in found} <= {"good", "bad"}
