"""The examples run as they are: one in a process of its own, all in this one."""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_checkpoint import small_checkpoint

from ckv_jax import demo
from ckv_jax.user_cache import cache_folder

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
Example = Callable[..., tuple[str, str]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small weights; a tokenizer that reads any text."""
    folder = tmp_path_factory.mktemp("examples") / "checkpoint"
    return small_checkpoint(folder)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """A call that runs an example with arguments in this process: its stdout and stderr."""

    def run(name: str, *args: object, stdin: str = "") -> tuple[str, str]:
        monkeypatch.setattr("sys.argv", [name, *map(str, args)])
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        out, err = capsys.readouterr()
        return out, err

    return run


def test_questions_over_a_folder(checkpoint: Path, tmp_path: Path, example: Example) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("The lamp is red. " * 20)
    (folder / "two.md").write_text("The lamp is green. " * 30)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    command = [
        "folder_questions.py", folder, "Which colour?", "--store", tmp_path / "kv",
        "--checkpoint", checkpoint,
    ]  # fmt: skip
    first = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True, text=True, timeout=240, check=True, cwd=EXAMPLES,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ).stdout  # fmt: skip
    assert len(first.splitlines()) == 2
    assert "one.txt" in first
    assert "two.md" in first
    assert example(*command) == (first, "")


def test_without_a_model_an_example_says_that_it_prints_noise(
    checkpoint: Path, tmp_path: Path, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the checkpoint that is made where there is none; `test_demo.py` makes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(checkpoint, cache_folder() / demo._RECIPE)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text("The lamp is red. " * 20)
    out, err = example("folder_questions.py", folder, "Which colour?", "--store", tmp_path / "kv")
    assert "their answers are noise" in err
    assert "hf download Qwen/Qwen2.5-0.5B-Instruct" in err
    assert "one.txt" in out


def test_a_chat_stores_its_history(checkpoint: Path, tmp_path: Path, example: Example) -> None:
    out, _ = example(
        "chat.py", "--store", tmp_path / "kv", "--checkpoint", checkpoint, "--max-tokens", 5,
        stdin="Good evening.\n\nAnd what then?\n",
    )  # fmt: skip
    stored = [int(line.split(", ")[1].split()[0]) for line in out.splitlines() if "stored]" in line]
    assert len(stored) == 2
    assert stored[1] > stored[0] > 0


def test_texts_are_classified_in_one_batch(
    checkpoint: Path, tmp_path: Path, example: Example
) -> None:
    examples = [("It shone all day.", "good"), ("It rained.", "bad")] * 8
    (tmp_path / "examples.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in examples)
    )
    texts = ["A fine morning.", "A wet evening.", "Fog."]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    out, err = example(
        "classify_jsonl.py", tmp_path / "texts.jsonl", "--examples", tmp_path / "examples.jsonl",
        "--store", tmp_path / "kv", "--checkpoint", checkpoint,
    )  # fmt: skip
    found = [json.loads(line) for line in out.splitlines()]
    assert [item["text"] for item in found] == texts
    assert {item["label"] for item in found} <= {"good", "bad"}
    assert "line 4" in err
