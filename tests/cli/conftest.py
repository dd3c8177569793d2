"""A checkpoint by transformers, the store that `ckv ingest` made of a text, what `ckv ask` says."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from command_line import QUESTION, TEXT, ckv
from small_checkpoint import transformers_checkpoint

from ckv_jax.cli import main


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and a text, and the store that `ckv ingest` made of them."""
    home = tmp_path_factory.mktemp("home")
    transformers_checkpoint(home / "checkpoint")
    (home / "text.txt").write_text(TEXT)
    return home


@pytest.fixture(scope="session")
def prefix(home: Path) -> dict[str, object]:
    """What `ckv ingest` says in this process; others ask the store that it made."""
    command = (
        "ckv", "ingest", home / "checkpoint", home / "text.txt", "--store", home / "kv",
        "--name", "handbook", "--json",
    )  # fmt: skip
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as said,
        pytest.raises(SystemExit) as exit_,
    ):
        patch.setattr(sys, "argv", [str(part) for part in command])
        main()
    assert not exit_.value.code
    return json.loads(said.getvalue())


@pytest.fixture(scope="session")
def answer(home: Path, prefix: dict) -> dict:
    done = ckv(
        "ask", home / "checkpoint", QUESTION, "--store", home / "kv", "--prefix", prefix["prefix"],
        "--budget", "0.25", "--max-tokens", "16", "--trace", home / "trace.json", "--json",
        cache=home,
    )  # fmt: skip
    return json.loads(done.stdout)
