"""`ckv inspect MODEL`: what a checkpoint is, told from its config and its files' headers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Here

from ckv_jax.model.weights import convert
from tests.model.gguf_files import write_gguf
from tests.model.hf_checkpoints import LLAMA3, write_checkpoint
from tests.model.small import write_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    theirs = write_checkpoint(folder / "hf", "llama")
    (folder / "parameters").write_text(str(sum(p.numel() for p in theirs.parameters())))
    write_tokenizer(folder / "hf")
    convert(folder / "hf", folder / "orbax", to="orbax")
    return folder


@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_a_checkpoint_of_either_format(form: str, llama: Path, here: Here) -> None:
    code, out, _ = here("inspect", llama / form, "--json", "--dtype", "float16")
    found = json.loads(out)
    parameters = int((llama / "parameters").read_text())
    assert code == 0
    assert (found["family"], found["format"], found["rope_type"]) == ("Llama", form, "llama3")
    assert (found["parameters"], found["weight_bytes"]) == (parameters, 2 * parameters)
    assert found["stored_dtype"] == "float32"
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 12 * 2  # K and V, layers, heads, size, bytes
    assert found["kv_bytes_of_full_context"] == 128 * found["kv_bytes_per_token"]
    for fit in found["fits"]:
        assert fit["room"] == int(0.9 * fit["bytes"]) - 2 * parameters
        assert fit["tokens"] == fit["room"] // found["kv_bytes_per_token"] > 0
    assert found["generation_ignored"] == {}


def test_people_read_the_same(llama: Path, here: Here) -> None:
    code, out, _ = here("inspect", llama / "hf")
    assert code == 0
    for fact in ("Llama (llama)", "192 B per token", "stretched from 32 by 8 (llama3)", "H200"):
        assert fact in out


def test_a_model_too_large_for_a_device_is_told(llama: Path, tmp_path: Path, here: Here) -> None:
    values = json.loads((llama / "orbax" / "config.json").read_text())
    values |= {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    values |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "weights").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(values))
    settings = {"repetition_penalty": 1.05, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    code, out, err = here("inspect", tmp_path)
    assert code == 0 and "too small" in out and "none" in out
    assert "not supported: repetition_penalty 1.05" in err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "has no config.json"),
        ({"model_type": "mixtral"}, "'mixtral', which is a mixture of experts"),
        ({"model_type": "llama"}, "the config lacks 'num_attention_heads'"),
        ({"num_hidden_layers": 3, "rope_parameters": LLAMA3}, "do not fit its config"),
    ],
)
def test_what_is_no_model_is_one_clear_line(
    config: dict | None, says: str, llama: Path, tmp_path: Path, here: Here
) -> None:
    (tmp_path / "README.txt").write_text("no model")
    if config is not None:
        if "model_type" not in config:
            config = json.loads((llama / "hf" / "config.json").read_text()) | config
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(llama / "hf" / "model.safetensors")
    code, out, err = here("inspect", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("ckv: ") and len(err.strip().splitlines()) == 1
    assert says in err


def test_a_checkpoint_has_no_prefixes(llama: Path, here: Here) -> None:
    code, _, err = here("inspect", llama / "hf", "3f9a")
    assert code == 1 and "is a checkpoint" in err
    assert here("inspect", llama / "hf", "--dtype", "int3")[0] == 1


def test_a_gguf_file_by_every_command(tmp_path: Path, here: Here) -> None:
    write_checkpoint(tmp_path, "qwen2", vocab_size=300, hidden_size=64, intermediate_size=96)
    write_tokenizer(tmp_path)
    path, store = write_gguf(tmp_path, tmp_path / "model.gguf", kind="Q8_0"), tmp_path / "kv"
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 4)
    code, out, _ = here("inspect", path, "--json")
    found = json.loads(out)
    assert (code, found["format"], found["stored_dtype"]) == (0, "gguf", "Q8_0, F32")
    code, out, err = here("ingest", path, tmp_path / "text.txt", "--store", store, "--json")
    assert code == 0, err
    prefix = json.loads(out)["prefix"]
    code, out, err = here(
        "ask", path, "the dog", "--store", store, "--prefix", prefix, "--max-tokens", 2, "--json"
    )
    assert code == 0, err
    assert json.loads(out)["model"] == "model.gguf"
    code, _, err = here("convert", path, tmp_path / "hf", "--to", "hf")
    assert code == 0, err
    code, _, err = here("inspect", tmp_path / "lost.gguf")
    assert code != 0 and "there is no file" in err
