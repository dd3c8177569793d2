"""ModelConfig: both of transformers' spellings, and every refusal with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckv_jax.errors import CheckpointError, UnsupportedModel
from ckv_jax.model.config import PUBLISHED, ModelConfig, RopeScaling

PARAMETERS = {
    "0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616, "14B": 14.770, "32B": 32.764,
    "72B": 72.706,
}  # fmt: skip


def hf(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    return values | changes


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes_have_the_published_parameters(name: str) -> None:
    c = PUBLISHED[name]
    queries, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = c.hidden_size * (2 * queries + 2 * kv) + queries + 2 * kv
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    tables = (1 if c.tie_word_embeddings else 2) * c.vocab_size * c.hidden_size
    total = tables + c.num_layers * layer + c.hidden_size
    assert total / 1e9 == pytest.approx(PARAMETERS[name], abs=1e-3)


def test_thin_model_has_the_kv_shape_of_7b() -> None:
    thin, real = PUBLISHED["kv7b-thin"], PUBLISHED["7B"]
    assert (thin.num_layers, thin.num_kv_heads, thin.head_dim) == (
        real.num_layers, real.num_kv_heads, real.head_dim,
    )  # fmt: skip


def test_both_spellings_of_rope_agree() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 1024}
    old = hf(rope_theta=5e5, rope_scaling={"type": "yarn", **yarn}, torch_dtype="bfloat16")
    new = hf(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **yarn}, dtype="bfloat16")
    config = ModelConfig.from_hf(old)
    assert config == ModelConfig.from_hf(new)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(factor=4.0, original_max_position_embeddings=1024)


def test_defaults_are_those_of_transformers() -> None:
    config = ModelConfig.from_hf(hf())
    assert (config.rope_theta, config.rope_scaling) == (10_000.0, None)
    assert (config.head_dim, config.rms_norm_eps) == (8, 1e-6)
    assert not config.tie_word_embeddings
    del (bare := hf())["num_key_value_heads"]
    assert ModelConfig.from_hf(bare).num_kv_heads == 4


def test_yarn_without_original_length_stretches_the_whole_context() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0}
    scaling = ModelConfig.from_hf(hf(rope_parameters=rope)).rope_scaling
    assert scaling == RopeScaling(factor=2.0, original_max_position_embeddings=4096)


@pytest.mark.parametrize("stated", [32768, 131072])
def test_yarn_as_qwen_documents_it_allows_the_stretched_context(stated: int) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = ModelConfig.from_hf(hf(max_position_embeddings=stated, rope_scaling=yarn))
    assert config.max_position_embeddings == 131072
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        (7, {}, (7,)),
        (7, {"eos_token_id": 5}, (7, 5)),
        (151645, {"eos_token_id": [151645, 151643]}, (151645, 151643)),
        (None, {"eos_token_id": [3, 0, 3]}, (3, 0)),
    ],
)
def test_ends_of_text_are_those_of_both_files(
    config: int | None, generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf(eos_token_id=config)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert ModelConfig.from_hf(tmp_path).eos_token_ids == expected
    assert ModelConfig.from_hf(tmp_path / "config.json").eos_token_ids == expected


@pytest.mark.parametrize("wrong", ["</s>", -1, True, [1, None], {"id": 3}, 1.5])
def test_a_wrong_end_of_text_is_named(wrong: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_to_hf_reads_back(name: str) -> None:
    config = PUBLISHED[name]
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "qwen3"}, "qwen3"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_refuses_what_it_cannot_honour(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        ModelConfig.from_hf(hf(**changes))


def test_inactive_sliding_window_is_no_reason_to_refuse() -> None:
    for inactive in (
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    ):
        assert ModelConfig.from_hf(hf(**inactive)).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "many"}, "many"),
    ],
)
def test_a_config_that_describes_no_model(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        ModelConfig.from_hf(hf(**changes))


def test_missing_fields_and_files_are_named(tmp_path: Path) -> None:
    del (values := hf())["hidden_size"]
    with pytest.raises(CheckpointError, match="hidden_size"):
        ModelConfig.from_hf(values)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="list"):
        ModelConfig.from_hf(tmp_path)


def test_rope_scaling_is_checked() -> None:
    with pytest.raises(ValueError, match="factor"):
        RopeScaling(factor=0.5, original_max_position_embeddings=10)
    with pytest.raises(ValueError, match="original_max"):
        RopeScaling(factor=2.0, original_max_position_embeddings=0)
