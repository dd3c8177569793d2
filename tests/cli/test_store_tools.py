"""Looking after a store by any name of it: which prefix is meant, and where the store lies."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_line import Here

from ckv_jax.model.weights import convert
from ckv_jax.storage import ChunkStore, StoreUnavailable
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.place.place import folder_of
from tests.model.gguf_files import write_gguf
from tests.model.hf_checkpoints import LLAMA3, write_checkpoint
from tests.model.small import write_tokenizer
from tests.support.truth import ingest, some_tokens


def test_a_start_of_several_ids_was_not_evicted(tmp_path: Path, here: Here) -> None:
    with ChunkStore.open(tmp_path / "kv") as store:
        found = [ingest(store, some_tokens(16, seed)) for seed in range(40)]
        start = next(s for s in "0123456789abcdef" if sum(p.id[0] == s for p in found) > 2)
        gone = next(p for p in found if p.id[0] == start)
        store.delete(gone)
        left = sum(p.id[0] == start for p in found) - 1
    code, _, err = here("inspect", tmp_path / "kv", start)
    assert code == 1 and f"{left} stored prefixes begin with" in err and "evicted" not in err
    code, _, err = here("inspect", tmp_path / "kv", gone.id[:16])
    assert code == 1 and f"prefix {gone.id} was evicted on" in err


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_store_is_found_by_its_url(tmp_path: Path, here: Here, host: str) -> None:
    folder = tmp_path / "my store"
    url = f"file://{host}{tmp_path}/my%20store"
    with ChunkStore.open(url) as store:
        prefix = ingest(store, some_tokens(64))
    assert (folder / "store.json").exists() and folder_of(url) == folder
    for command in (
        ["inspect", url, prefix.id],
        ["verify", url],
        ["pin", url, prefix.id],
        ["prune", url, "--max-bytes", "1GB"],
    ):
        code, out, _ = here(*command, "--json")
        assert code == 0 and json.loads(out), command


def test_a_url_of_another_machine_is_refused(here: Here) -> None:
    assert folder_of("s3://bucket/kv") is None
    code, _, err = here("verify", "file://elsewhere/kv")
    assert code == 1 and "expected file:///path" in err


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["prune", "--max-bytes", "0"]])
def test_looking_after_no_store_makes_none(tmp_path: Path, here: Here, command: list[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = here(*command, empty)
    assert code == 1 and "there is no store" in err
    assert list(empty.iterdir()) == []


def test_the_store_is_shown_checked_pinned_and_pruned(
    home: Path, prefix: dict, tmp_path: Path, here: Here
) -> None:
    store, name = tmp_path / "kv", str(prefix["prefix"])
    shutil.copytree(home / "kv", store)

    def look_after(*args: object) -> dict:
        code, out, _ = here(*args, "--json")
        assert code == 0
        return json.loads(out)

    shown = look_after("inspect", store, name)
    assert shown["prefixes"] == {name: prefix["tokens"]}
    assert len(shown["prefix"]["layers"]) == 2
    (segment,) = shown["segments"]
    assert segment["name"] == "handbook"
    assert segment["source"] in ("text.txt", "stdin")  # another test stores it again from there
    assert segment["begins"] == "The lamp of room 0 is number 0. The lamp of room 1 is …"
    seen = " ".join(here("inspect", store, name[:5])[1].split())
    assert name in seen and "handbook" in seen
    for fact in (
        "1 prefix in 1 segment, ", f"tokens 1 to {prefix['tokens']:,}, ", "A segment is",
        "bfloat16 in chunks of 8 tokens, selected by compressed keys (int4)",
        "the mean of the absolute values",
    ):  # fmt: skip
        assert fact in seen, fact
    assert look_after("verify", store)["ok"]

    assert here("inspect", store, "handbook")[1] == here("inspect", store, name)[1]
    code, _, err = here("inspect", store, "handbok")
    assert code == 1 and "handbook" in err

    assert look_after("pin", store, "handbook")["prefix"] == name
    code, out, err = here("prune", store, "--max-bytes", "0", "--json")
    assert (code, json.loads(out)["removed"]) == (3, 0) and "the rest is pinned" in err
    assert not look_after("pin", store, name, "--unpin")["pinned"]
    pruned = look_after("prune", store, "--max-bytes", "1kB")
    assert (pruned["removed"], pruned["bytes_after"]) == (1, 0)


def test_an_index_that_differs_from_the_disk_is_a_fault(
    home: Path, prefix: dict, tmp_path: Path, here: Here
) -> None:
    store = tmp_path / "kv"
    shutil.copytree(home / "kv", store)
    with contextlib.closing(sqlite3.connect(store / "catalog.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE segments SET parent = id")
    code, out, _ = here("verify", store)
    assert code == 1 and "the index differs from the disk" in out
    assert "1 fault" in out and f"run: ckv verify {store} --repair" in out
    assert here("verify", store, "--repair")[0] == 0
    assert here("verify", store)[0] == 0


def test_a_repair_that_could_not_read_all_says_so(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(tmp_path / "kv") as store:
        ingest(store, some_tokens(16))
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "manifest", Mock(side_effect=StoreUnavailable("not now")))
        code, out, _ = here("verify", tmp_path / "kv", "--repair")
    assert code == 1 and "1 not read" in out
    assert here("verify", tmp_path / "kv", "--repair")[0] == 0


def test_an_encrypted_store_needs_its_key(
    home: Path, prefix: dict, tmp_path: Path, here: Here
) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("ab" * 32)
    other.write_text("cd" * 32)
    store, texts, model = tmp_path / "kv", home / "text.txt", home / "checkpoint"
    mine = ("--encrypt-key-file", key)
    assert here("ingest", model, texts, "--store", store, "--name", "book", *mine)[0] == 0
    code, out, _ = here("ask", model, "Which?", "--store", store, "--max-tokens", 2, *mine)
    assert code == 0 and out.strip()
    assert "book" in here("inspect", store, *mine)[1]
    assert json.loads(here("verify", store, "--json", *mine)[1])["ok"]
    assert here("pin", store, "book", *mine)[0] == 0
    for command in (
        ("inspect", store), ("verify", store, "--repair"), ("pin", store, "book"),
        ("prune", store, "--max-bytes", 0), ("ask", model, "Which?", "--store", store),
    ):  # fmt: skip
        code, out, err = here(*command)
        assert code == 1 and "not readable without --encrypt-key-file" in err
        assert len(err.strip().splitlines()) <= 2 and not out
        code, _, err = here(*command, "--encrypt-key-file", other)
        assert code == 1 and "with another key than that in --encrypt-key-file" in err
    assert json.loads(here("verify", store, "--json", *mine)[1])["ok"]
    code, _, err = here("inspect", home / "kv", *mine)
    assert code == 1 and "not encrypted: leave --encrypt-key-file (CKV_ENCRYPT_KEY_FILE) out" in err


# -- checkpoints -----------------------------------------------------------------------------------


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
    for fact in ("Llama (llama)", "192 B per token", "RoPE scaled from 32 by 8 (llama3)", "H200"):
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
    assert "are ignored: repetition_penalty 1.05" in err


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
    assert code == 1 and "with the checkpoint" in err
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
