"""Small engines for tests: random weights, real store, real reads."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from ckv_jax import Engine, EngineConfig, Generation, Request, SamplingParams
from ckv_jax.config import SystemConfig
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.weights import fingerprint_of, random_model
from ckv_jax.pipeline.layers import Layers
from ckv_jax.selection.select import NOTHING, Coarse, Select
from ckv_jax.storage.chain import Fingerprint
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import SYSTEMS, system_named

SMALL = ModelConfig(
    model_type="qwen2",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_layers=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)

TIGHT = 1e-4
"""Largest `scale_error` of float32 logits between two orders of the same sums."""

MIB = 2**20

CHUNKED = dataclasses.replace(
    SYSTEMS["ckv-16"],
    name="ckv",
    always=NOTHING,
    reprefill=Select(score_layers=3, queries=4, coarse=Coarse(survivors=4)),
    decode=Select(score_layers=3, queries=4, coarse=Coarse(survivors=4, least=64)),
)
"""What tests of the machinery call "ckv": numbers of their own, whatever the preset's become. Tests
of the preset itself take it from `SYSTEMS`."""


def tokens(n: int, seed: int = 0) -> np.ndarray:
    """Random token ids int32 [n] of the small model."""
    return np.random.default_rng(seed).integers(0, SMALL.vocab_size, n).astype(np.int32)


def random_fingerprint(model: Transformer) -> Fingerprint:
    """Of a model that is in no folder: the content of its arrays."""
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))):
        content.update(np.asarray(leaf).tobytes())
    return fingerprint_of(
        model.config, dtype=model.dtype.name, weights=content.hexdigest(), tokenizer=""
    )


@functools.cache
def compiled_layers(model: ModelConfig, dtype: str, seed: int) -> tuple[Layers, Fingerprint]:
    """A random model, whose engines share what is compiled for it: tests of one process
    mostly ask for the same few, and compiling is most of what they do."""
    weights = random_model(model, dtype=dtype, seed=seed)
    return Layers(weights), random_fingerprint(weights)


def preset_of(name: str) -> SystemConfig:
    """A system by its name; `CHUNKED` for "ckv"."""
    return CHUNKED if name == "ckv" else system_named(name)


def small_engine(
    folder: Path,
    *,
    system: str | SystemConfig = "contiguous-kv",
    model: ModelConfig = SMALL,
    weights: Transformer | None = None,
    seed: int = 0,
    overrides: dict[str, object] | None = None,
    nothing_compiled: bool = False,
    **config: object,
) -> Engine:
    """An engine over a store in `folder`, with `weights` or a random model.

    `nothing_compiled`: for tests that count programs, which must all be compiled by themselves.
    """
    preset = preset_of(system) if isinstance(system, str) else system
    values: dict[str, object] = {
        "dtype": "float32",
        "device_cache_bytes": MIB,
        "host_cache_bytes": MIB,
        "prefetch_device_bytes": 8 * MIB,
        "prefetch_host_bytes": 8 * MIB,
        "prefill_block": 128,
        "io_threads": 2,
    }
    engine_config = EngineConfig(
        system=dataclasses.replace(preset, **(overrides or {})), **(values | config)
    )
    if weights is None:
        make = compiled_layers.__wrapped__ if nothing_compiled else compiled_layers
        layers, fingerprint = make(model, engine_config.dtype, seed)
    else:
        layers, fingerprint = Layers(weights), random_fingerprint(weights)
    return Engine(layers, None, ChunkStore.open(folder), fingerprint, engine_config)


def kept_kv(engine: Engine, requests: list[Request], *, max_tokens: int) -> list[np.ndarray]:
    """Keys and values of all that each text computed, which every attention has been through."""
    sampling = SamplingParams(max_tokens=max_tokens)
    texts = engine.generate(requests, sampling, keep_kv=True).results()
    for text in texts:
        text.raise_for_error()
    return [np.asarray(text.completion().kv) for text in texts]


def check_alone(engine: Engine, requests: list[Request], *, max_tokens: int) -> None:
    """Generations in one batch are what each is alone, but for how products of more rows round."""
    together = kept_kv(engine, requests, max_tokens=max_tokens)
    for request, mine in zip(requests, together, strict=True):
        [alone] = kept_kv(engine, [request], max_tokens=max_tokens)
        assert scale_error(mine, alone) < TIGHT


def check_kv(text: Generation, expected: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """A generation computed these keys and values [n, K, D] of each layer."""
    found = np.asarray(text.completion().kv)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert scale_error(one[: len(other)], other) < TIGHT


def scale_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, as a share of the logits' scale."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())
