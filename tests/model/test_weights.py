"""Checkpoints in and out: every fault is named, nothing is half-written, memory stays low."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from ckv_jax.errors import CheckpointError
from ckv_jax.model.checkpoint import (
    SafetensorsFile,
    is_orbax,
    stored_dtype,
    weight_files,
    write_safetensors,
)
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.tensor_map import inspect_model
from ckv_jax.model.tokenizer import load_tokenizer, tokenizer_files
from ckv_jax.model.weights import (
    convert,
    load_pretrained,
    random_model,
    restore_orbax,
    save_orbax,
    save_pretrained,
)
from ckv_jax.storage.chain import hash_files
from tests.model.hf_checkpoints import write_checkpoint
from tests.model.small import CONFIG, dense, small_model, write_tokenizer

Edit = Callable[[dict[str, np.ndarray]], None]


def equal(one: Transformer, two: Transformer) -> bool:
    same = jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(one), nnx.state(two))
    return jax.tree.all(same)


@pytest.mark.parametrize(
    ("dtype", "shard_bytes", "tied"),
    [("float32", 2**30, True), ("bfloat16", 10_000, False), ("float16", 10_000, True)],
)
def test_saved_weights_load_bit_for_bit(
    dtype: str, shard_bytes: int, tied: bool, tmp_path: Path
) -> None:
    config = ModelConfig.from_hf(CONFIG.to_hf() | {"tie_word_embeddings": tied})
    model = random_model(config, dtype=dtype, seed=3)
    save_pretrained(model, tmp_path, max_shard_bytes=shard_bytes)
    assert (len(weight_files(tmp_path)) > 1) == (shard_bytes == 10_000)
    loaded = load_pretrained(tmp_path, dtype=dtype)
    assert loaded.config == config
    assert equal(model, loaded)


def test_loads_what_transformers_writes_in_several_files(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    theirs = Qwen2ForCausalLM(Qwen2Config(**CONFIG.to_hf(dtype="float32"))).eval()
    theirs.save_pretrained(str(tmp_path), max_shard_size="20KB")
    assert len(weight_files(tmp_path)) > 1
    tokens = np.arange(24)[None] % CONFIG.vocab_size
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    got = dense(load_pretrained(tmp_path, dtype="float32"), jax.numpy.asarray(tokens))
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def rewrite(path: Path, edit: Edit) -> None:
    """Change the tensors of a float32 file."""
    file = SafetensorsFile(path)
    tensors = {name: file.read(name) for name in file.shapes}
    edit(tensors)
    shapes = [(name, data.shape) for name, data in tensors.items()]
    write_safetensors(path, shapes, np.dtype(np.float32), tensors.__getitem__)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing tensor 'model\.norm\.weight'"),
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), r"missing .*layers\.1.*k_proj"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.ones(4, np.float32)}),
            r"unknown tensor 'model\.layers\.0\.self_attn\.q_norm\.weight'",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.ones((5, 32), np.float32)}),
            r"'lm_head\.weight' has shape \(5, 32\), expected \(96, 32\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(edit: Edit, message: str, tmp_path: Path) -> None:
    save_pretrained(small_model(dtype="float32"), tmp_path)
    rewrite(tmp_path / "model.safetensors", edit)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path)


def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    save_pretrained(small_model(dtype="float32"), folder, max_shard_bytes=30_000)
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())["weight_map"]


def test_a_tensor_in_two_shards_is_a_duplicate(tmp_path: Path) -> None:
    _, places = sharded(tmp_path)
    name = "model.norm.weight"
    other = next(file for file in places.values() if file != places[name])
    rewrite(tmp_path / other, lambda t: t.update({name: np.ones(32, np.float32)}))
    with pytest.raises(CheckpointError, match=f"duplicate tensor '{name}'"):
        load_pretrained(tmp_path)


def test_resaving_leaves_no_stale_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    many = weight_files(tmp_path)
    save_pretrained(small_model(seed=3), tmp_path)
    assert equal(load_pretrained(tmp_path), small_model(seed=3))
    assert not any(path.exists() for path in many)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    index, places = sharded(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"

    def write(weight_map: object) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))

    write({key: file for key, file in places.items() if key != name})
    with pytest.raises(CheckpointError, match=f"unknown tensor '{name}'"):
        load_pretrained(tmp_path)
    write(places | {"model.extra": places[name]})
    with pytest.raises(CheckpointError, match=r"missing tensor 'model\.extra'"):
        load_pretrained(tmp_path)
    write(places | {name: "../elsewhere.safetensors"})
    with pytest.raises(CheckpointError, match="outside its folder"):
        load_pretrained(tmp_path)
    write(["not a map"])
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load_pretrained(tmp_path)


def header(text: str, data: int = 0) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + bytes(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short"),
        (b"not a safetensors file at all", "not a safetensors file"),
        (header("{nonsense}"), "damaged safetensors header"),
        (header("[1, 2]"), "damaged safetensors header"),
        (header('{"x": {"dtype": "F32", "shape": [2]}}'), "damaged safetensors header"),
        (header("[" * 100_000), "damaged safetensors header"),
        (
            header('{"x": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}', 8),
            "has no size",
        ),
        (
            header('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 4),
            "beyond the file's end",
        ),
        (
            header('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', 8),
            "does not fill its bytes",
        ),
        (
            header('{"x": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}', 2),
            "F8_E4M3, expected BF16, F16, F32",
        ),
        (
            header(
                '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
                ' "x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
                8,
            ),
            "duplicate tensor 'x'",
        ),
    ],
)
def test_broken_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    save_pretrained(small_model(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(tmp_path)


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        weight_files(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["config.json", "pytorch_model.bin"], r"PyTorch pickles \(pytorch_model.bin\)"),
        (["adapter_config.json", "adapter_model.safetensors"], "is a LoRA adapter"),
        (["params.json", "consolidated.00.pth"], r"own format \(consolidated.00.pth\)"),
        (["model-q4.gguf"], "is a folder of GGUF files: give the file, such as model-q4.gguf"),
        (["README.md"], "has no config.json"),
    ],
)
def test_what_a_folder_is_instead_of_a_checkpoint(
    files: list[str], says: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text(json.dumps(CONFIG.to_hf()))
    with pytest.raises(CheckpointError, match=says):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_git_lfs_pointer_is_refused_as_one(name: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(CheckpointError, match=f"{name} is a git-lfs pointer"):
        load_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a git-lfs pointer"):
        load_tokenizer(tmp_path)


def test_a_tied_checkpoint_that_holds_a_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same as the embedding: ignored. Another one: used, and reported."""
    tied = ModelConfig.from_hf(CONFIG.to_hf() | {"tie_word_embeddings": True})
    save_pretrained(random_model(tied, dtype="float32"), tmp_path)
    path = tmp_path / "model.safetensors"
    table = SafetensorsFile(path).read("model.embed_tokens.weight")
    before = load_pretrained(tmp_path, dtype="float32")
    rewrite(path, lambda t: t.update({"lm_head.weight": table}))
    assert equal(load_pretrained(tmp_path, dtype="float32"), before)
    assert inspect_model(tmp_path).config.tie_word_embeddings
    assert not caplog.records
    rewrite(path, lambda t: t.update({"lm_head.weight": 2 * table}))
    model = load_pretrained(tmp_path, dtype="float32")
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.head[...], 2 * table)
    assert "hold another head (lm_head.weight), which is used" in caplog.text
    rewrite(path, lambda t: t.update({"lm_head.weight": table[:-1]}))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' has shape \(95, 32\)"):
        load_pretrained(tmp_path, dtype="float32")


def test_buffers_that_the_config_determines_are_ignored(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file  # numpy has no bfloat16

    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}

    def add_buffers(path: Path) -> None:
        save_file(load_file(str(path)) | buffers, str(path), {"format": "pt"})

    model = small_model(seed=4)
    save_pretrained(model, tmp_path / "one")
    add_buffers(tmp_path / "one" / "model.safetensors")
    assert equal(load_pretrained(tmp_path / "one"), model)
    assert stored_dtype(tmp_path / "one") == "bfloat16"
    save_pretrained(model, tmp_path / "many", max_shard_bytes=10_000)
    index = tmp_path / "many" / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    last = sorted(set(places["weight_map"].values()))[-1]
    add_buffers(tmp_path / "many" / last)
    places["weight_map"] |= dict.fromkeys(buffers, last)
    index.write_text(json.dumps(places))
    assert equal(load_pretrained(tmp_path / "many"), model)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    fail = Mock(side_effect=OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        write_safetensors(tmp_path / "x", [("a", (2,))], np.dtype(np.float32), fail)
    assert list(tmp_path.iterdir()) == []


def test_host_memory_stays_at_the_largest_parameter(tmp_path: Path) -> None:
    """Every host allocation of a load, as numpy reports it; device buffers are not counted."""
    values = CONFIG.to_hf() | {"num_hidden_layers": 6, "hidden_size": 256, "vocab_size": 1024}
    model = random_model(ModelConfig.from_hf(values | {"intermediate_size": 512}))
    save_pretrained(model, tmp_path)
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    del model
    load_pretrained(tmp_path)  # compiles, so that only data is counted below
    peaks = []
    for _ in range(3):  # the least counts: other threads allocate, too
        tracemalloc.start()
        try:
            load_pretrained(tmp_path)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    peak = min(peaks)
    assert file_bytes > 8 * largest
    assert largest / 2 < peak < 3 * largest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_conversion_there_and_back_keeps_every_bit(dtype: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "hf")
    save_pretrained(small_model(dtype=dtype, seed=6), tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    convert(tmp_path / "hf", tmp_path / "orbax", to="orbax")
    convert(tmp_path / "orbax", tmp_path / "back", to="hf")
    original, orbax, back = (tmp_path / name for name in ("hf", "orbax", "back"))
    for folder in (orbax, back):
        assert stored_dtype(folder) == dtype
        assert load_pretrained(folder, dtype=dtype).config.eos_token_ids == (1, 2, 9)
        assert hash_files(tokenizer_files(folder)) == hash_files(tokenizer_files(original))
    assert (back / "model.safetensors").read_bytes() == (
        original / "model.safetensors"
    ).read_bytes()
    assert equal(load_pretrained(orbax), load_pretrained(original))
    assert is_orbax(orbax) and not is_orbax(back)
    assert all(path.is_file() for path in weight_files(orbax))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "orbax"]


@pytest.mark.parametrize("name", ["qwen3-odd", "llama-odd", "mistral-odd"])
def test_every_family_is_converted_there_and_back(name: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path / "hf", name)
    write_tokenizer(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "orbax", to="orbax")
    convert(tmp_path / "orbax", tmp_path / "back", to="hf")
    original, orbax, back = (
        ModelConfig.from_hf(tmp_path / folder) for folder in ("hf", "orbax", "back")
    )
    assert orbax == back == original
    again = type(theirs).from_pretrained(tmp_path / "back")
    for key, value in theirs.state_dict().items():
        assert bool((again.state_dict()[key] == value).all()), key


def test_conversion_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "hf")
    save_pretrained(small_model(), tmp_path / "hf")
    with pytest.raises(ValueError, match="got format 'onnx', expected one of orbax, hf"):
        convert(tmp_path / "hf", tmp_path / "new", to="onnx")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there already"):
        convert(tmp_path / "hf", tmp_path / "hf", to="orbax")
    with pytest.raises(CheckpointError, match="there is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "new", to="orbax")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="cut short"):
        convert(tmp_path / "hf", tmp_path / "new", to="orbax")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_orbax_gives_back_the_same_model(tmp_path: Path) -> None:
    model = small_model(seed=5)
    save_orbax(small_model(seed=4), tmp_path / "c")
    save_orbax(model, tmp_path / "c")  # replaces the first
    restored = restore_orbax(tmp_path / "c")
    assert restored.config == CONFIG
    assert restored.dtype == model.dtype
    assert equal(model, restored)
    wide = restore_orbax(tmp_path / "c", dtype="float32")
    assert (wide.dtype, wide.out_first) == ("float32", model.out_first)


def test_orbax_faults_are_named(tmp_path: Path) -> None:
    save_orbax(small_model(), tmp_path)
    deeper = CONFIG.to_hf() | {"num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(deeper))
    with pytest.raises(CheckpointError, match=r"do not fit its config: missing .*layers\.3"):
        restore_orbax(tmp_path)
    save_pretrained(small_model(), tmp_path / "hf")
    with pytest.raises(CheckpointError, match="not an Orbax checkpoint"):
        restore_orbax(tmp_path / "hf")
