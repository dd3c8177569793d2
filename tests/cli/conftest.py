"""A checkpoint by transformers, the store that `ckv ingest` made of a text, what `ckv ask` says."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from command_line import QUESTION, TEXT, ckv

from ckv_jax.cli import main
from ckv_jax.data.reference import save_tokenizer


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and a text, and the store that `ckv ingest` made of them."""
    home = tmp_path_factory.mktemp("home")
    checkpoint = home / "checkpoint"
    vocab = save_tokenizer_in(checkpoint)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(checkpoint)
    (home / "text.txt").write_text(TEXT)
    return home


def save_tokenizer_in(folder: Path) -> int:
    folder.mkdir()
    return save_tokenizer(folder, 512)


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
    found: dict[str, object] = json.loads(said.getvalue())
    return found


@pytest.fixture(scope="session")
def answer(home: Path, prefix: dict) -> dict:
    done = ckv(
        "ask", home / "checkpoint", QUESTION, "--store", home / "kv", "--prefix", prefix["prefix"],
        "--budget", "0.25", "--trace", home / "trace.json", "--json", cache=home,
    )  # fmt: skip
    found: dict = json.loads(done.stdout)
    return found
