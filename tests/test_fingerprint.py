"""KV belongs to what made it: each thing it depends on, changed alone, makes it another model's."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import SMALL, random_fingerprint, tokens
from numpy_qwen import NumpyQwen

from ckv_jax import Engine, EngineConfig, Request
from ckv_jax.data.reference import reference_folder
from ckv_jax.model.rope import YarnScaling
from ckv_jax.model.weights import random_model
from ckv_jax.storage.errors import FingerprintMismatch

MODEL = dataclasses.replace(
    SMALL,
    vocab_size=1355,  # the shipped tokenizer's
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    tie_word_embeddings=False,
)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes of files are remembered in the user's cache: here in one of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    rope = {k: changes.pop(k) for k in list(changes) if k in ("rope_theta", *YARN)}
    values["rope_parameters"] |= rope
    path.write_text(json.dumps(values | changes))


def tokenizer_of(folder: Path) -> None:
    """Two words change their ids: the same text is other tokens, of which nothing else tells."""
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    vocab = values["model"]["vocab"]
    vocab[-1], vocab[-2] = vocab[-2], vocab[-1]  # (piece, score) in order of their ids
    path.write_text(json.dumps(values))


def weights_of(folder: Path) -> None:
    NumpyQwen(MODEL, seed=1).save(folder)


CHANGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "dtype": ("dtype", lambda folder: None, "float16"),
    "rope base": ("rope", lambda folder: config_of(folder, rope_theta=5e5), "float32"),
    "rope scaling": ("rope", lambda folder: config_of(folder, **YARN), "float32"),
    "norm": ("config", lambda folder: config_of(folder, rms_norm_eps=1e-5), "float32"),
    "tokenizer": ("tokenizer", tokenizer_of, "float32"),
    "weights": ("weights", weights_of, "float32"),
}


def opened(folder: Path, store: Path, dtype: str = "float32") -> Engine:
    config = EngineConfig(
        system="contiguous-kv",
        dtype=dtype,
        device_cache_bytes=0,
        host_cache_bytes=0,
        prefetch_device_bytes=2**20,
        prefetch_host_bytes=2**20,
        prefill_block=64,
    )
    return Engine.from_pretrained(folder, store=store, config=config)


def test_each_is_named_when_it_alone_differs(tmp_path: Path) -> None:
    folder, store = tmp_path / "model", tmp_path / "store"
    NumpyQwen(MODEL, seed=0).save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reference_folder() / name, folder / name)
    text = tokens(64)
    with opened(folder, store) as engine:
        prefix = engine.ingest(text)
    for name, (field, change, dtype) in CHANGES.items():
        changed = tmp_path / name
        shutil.copytree(folder, changed)
        change(changed)
        with opened(changed, store, dtype) as other:
            with pytest.raises(FingerprintMismatch) as error:
                other.check_prefix(prefix)
            assert error.value.fields == (field,), name
            for asked in (prefix, prefix.id):
                with pytest.raises(FingerprintMismatch):
                    other.recompute(Request(prefix=asked, suffix=[1]))
            found = other.store.longest_prefix(
                text, fingerprint=other.fingerprint, layout=prefix.layout
            )
            assert found.num_tokens == 0, name
    copied = tmp_path / "copied"  # a name is not a difference
    shutil.copytree(folder, copied)
    with opened(copied, store) as same:
        same.check_prefix(prefix)
        assert same.ingest(text) == prefix


def test_what_qwen_models_stored_before_is_still_theirs() -> None:
    """Fields of a fingerprint as they were when there was no other family."""
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=16)
    model = random_model(dataclasses.replace(MODEL, rope_scaling=yarn), dtype="float32")
    fields = random_fingerprint(model).fields
    assert fields["config"] == (
        '{"head_dim": 16, "hidden_size": 16, "intermediate_size": 16, "model_type": "qwen2", '
        '"num_heads": 1, "num_kv_heads": 1, "num_layers": 2, "rms_norm_eps": 1e-06, '
        '"tie_word_embeddings": false, "vocab_size": 1355}'
    )
    assert fields["rope"] == (
        '{"rope_scaling": {"attention_factor": null, "beta_fast": 32.0, "beta_slow": 1.0, '
        '"factor": 4.0, "mscale": null, "mscale_all_dim": null, '
        '"original_max_position_embeddings": 16, "truncate": true}, "rope_theta": 10000.0}'
    )
    assert set(fields) == {"weights", "config", "tokenizer", "rope", "dtype"}


def test_a_switch_of_biases_is_another_model() -> None:
    llama = dataclasses.replace(MODEL, model_type="llama")
    plain, biased = (
        random_fingerprint(random_model(config, dtype="float32"))
        for config in (llama, dataclasses.replace(llama, mlp_bias=True))
    )
    assert plain.fields["config"] != biased.fields["config"]
