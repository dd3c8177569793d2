"""ModelConfig: both of transformers' spellings, and every refusal with its reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ckv_jax.errors import CheckpointError, UnsupportedModel
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.rope import YarnScaling
from ckv_jax.model.tensor_map import count_parameters
from tests.model.hf_checkpoints import LLAMA3

LLAMA_31 = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip
OTHER_FAMILIES: dict[str, tuple[dict[str, Any], float, int]] = {
    "Llama-3.1-8B": (LLAMA_31, 8.030, 131072),
    "Qwen3-8B": (
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
            "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
        },
        8.191,
        40960,
    ),
    "Mistral-7B-v0.3": (
        {
            "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None,
        },
        7.248,
        32768,
    ),
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


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_published_configs_of_other_families_read_as_they_are(name: str) -> None:
    values, billions, positions = OTHER_FAMILIES[name]
    config = ModelConfig.from_hf(values)
    assert count_parameters(config) / 1e9 == pytest.approx(billions, abs=1e-3)
    assert config.max_position_embeddings == positions
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_what_a_config_leaves_out_is_what_its_family_takes_for_it() -> None:
    qwen3 = ModelConfig.from_hf(hf(model_type="qwen3"))
    assert (qwen3.head_dim, qwen3.eos_token_ids) == (128, ())
    del (bare := hf(model_type="mistral", sliding_window=None, num_attention_heads=16))[
        "num_key_value_heads"
    ]
    mistral = ModelConfig.from_hf(bare)
    assert (mistral.num_kv_heads, mistral.eos_token_ids) == (8, (2,))
    assert ModelConfig.from_hf(hf(model_type="llama", eos_token_id=None)).eos_token_ids == ()
    assert not ModelConfig.from_hf(hf(attention_bias=True)).attention_bias  # HF's has none there
    with pytest.raises(ValueError, match=r"attention_bias, which Qwen2\.5 models do not have"):
        dataclasses.replace(ModelConfig.from_hf(hf()), attention_bias=True)


def test_both_spellings_of_rope_agree() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 1024}
    old = hf(rope_theta=5e5, rope_scaling={"type": "yarn", **yarn}, torch_dtype="bfloat16")
    new = hf(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **yarn}, dtype="bfloat16")
    config = ModelConfig.from_hf(old)
    assert config == ModelConfig.from_hf(new)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == YarnScaling(factor=4.0, original_max_position_embeddings=1024)


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
    assert scaling == YarnScaling(factor=2.0, original_max_position_embeddings=4096)


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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, r"'gpt2', a family .* not supported; .*llama \(Llama\), mistral"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "a family that is not supported"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "'qwen3_moe', which is a mixture"),
        ({"model_type": "new", "n_routed_experts": 8}, r"'new', .* mixture .*n_routed_experts 8"),
        ({"num_experts": 8}, "'qwen2', which is a mixture of experts"),
        ({"model_type": "jamba"}, "'jamba', which has layers that keep a running state .*Mamba"),
        ({"model_type": "new", "mamba_d_state": 16}, "running state .*mamba_d_state"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "running state .*linear_att"),
        ({"model_type": "gemma3_text"}, "'gemma3_text', which has layers .* sliding window"),
        (
            {"model_type": "mistral", "max_position_embeddings": 32768},
            r"'mistral', .*sliding window .*\(sliding_window 4096\)",
        ),
        ({"model_type": "new", "sliding_window": 64}, "sliding_window 64"),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1}, "sliding"),
        ({"model_type": "mllama", "text_config": {}}, "more than text .* are supported$"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
            r"window .* prefix \(layer_types: sliding_attention\)",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
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
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 4096},  # as long as the context
        {"model_type": "llama", "sliding_window": 64},  # of which Llama knows nothing
    ):
        assert ModelConfig.from_hf(hf(**inactive)).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
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
        YarnScaling(factor=0.5, original_max_position_embeddings=10)
    with pytest.raises(ValueError, match="original_max"):
        YarnScaling(factor=2.0, original_max_position_embeddings=0)
