"""A small checkpoint with a tokenizer, and what serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("starlette", reason="the server needs the extra `serve`")

from server.applications import serving
from server.serving import KEYS, Served
from small_checkpoint import small_checkpoint

from ckv_jax import Engine, EngineConfig
from ckv_jax.storage.store import ChunkStore

CONTEXT = 8192


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights whose attention is sharp; a tokenizer that reads any text."""
    folder = small_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint", dtype="float32")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():  # attention as sharp as a trained model's
        times = {"q_proj": 25, "k_proj": 25, "v_proj": 10, "o_proj": 10, "embed": 20}
        weight *= next((by for part, by in times.items() if part in name), 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    config["eos_token_id"] = None  # texts are as long as they are asked to be
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tenants, the second of whom may have one request under way."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(
        f'[alice]\nkeys = ["{KEYS["alice"]}"]\nsalt = "a"\n'
        f'[bob]\nkeys = ["{KEYS["bob"]}"]\nmax_requests = 1\n'
    )
    return file


@pytest.fixture(scope="session")
def served(
    checkpoint: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One server that many tests share."""
    store = tmp_path_factory.mktemp("served") / "kv"
    server = Served(checkpoint, store, "--api-keys", keys, "--no-guard-disk")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same model in this process, for applications with settings of their own."""
    config = EngineConfig(dtype="float32", compilation_cache=False)
    store = tmp_path_factory.mktemp("kv")
    with Engine.from_pretrained(checkpoint, store=store, config=config) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    """An application over it, which a module's tests share."""
    with serving(engine) as url:
        yield url


@pytest.fixture
def fresh(engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """The same engine over a store of its own."""
    with (
        ChunkStore.open(tmp_path / "kv") as store,
        engine.variant(engine.config, store=store) as variant,
    ):
        yield variant
