"""The table of model families by `model_type`; a module of your own may add to it.

Models that cannot be served are refused, each with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckv_jax.errors import UnsupportedModel
from ckv_jax.model.families.family import Family
from ckv_jax.model.families.llama import LLAMA
from ckv_jax.model.families.mistral import MISTRAL
from ckv_jax.model.families.qwen2 import QWEN2
from ckv_jax.model.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (QWEN2, QWEN3, LLAMA, MISTRAL)
}

_MIXTURE = "is a mixture of experts; only models whose tokens all take the same way are supported"
_HYBRID = (
    "has layers that keep a running state in place of keys and values (linear attention, Mamba); "
    "what cannot be cut into tokens cannot be stored in chunks"
)
_SLIDING = (
    "has layers that see only a sliding window of the last tokens; every layer has to see the "
    "whole prefix"
)
_PICTURES = (
    "takes more than text (it has parts of several modalities); only models of text alone are "
    "supported"
)

_BY_NAME: Mapping[str, str] = {
    name: reason
    for reason, names in (
        (
            _MIXTURE,
            "mixtral qwen2_moe qwen3_moe llama4 llama4_text deepseek_v2 deepseek_v3 deepseek_v32 "
            "gpt_oss dbrx olmoe phimoe granitemoe glm4_moe ernie4_5_moe minimax_m2",
        ),
        (
            _HYBRID,
            "mamba mamba2 falcon_mamba jamba bamba zamba zamba2 falcon_h1 nemotron_h rwkv xlstm "
            "granitemoehybrid qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe recurrent_gemma minimax "
            "lfm2 lfm2_moe kimi_linear olmo_hybrid",
        ),
        (_SLIDING, "gemma2 gemma3 gemma3_text gemma3n cohere2 ministral olmo3 exaone4 starcoder2"),
    )
    for name in names.split()
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_STATES = (
    "mamba_d_state", "mamba_d_conv", "ssm_cfg", "ssm_state_size", "state_size",
    "linear_num_key_heads", "linear_conv_kernel_dim", "hybrid_override_pattern",
    "layers_block_type", "attn_layer_indices",
)  # fmt: skip


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of an HF config, if everything that it says is computed here.

    Raises `UnsupportedModel`, which names what is not supported and why.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    whole = config if family is None else {**family.defaults, **config}
    for reason in _reasons(whole, kind, family):
        raise UnsupportedModel(f"got model_type {kind!r}, which {reason}")
    if family is None:
        known = ", ".join(f"{name} ({family.title})" for name, family in FAMILIES.items())
        raise UnsupportedModel(
            f"got model_type {kind!r}, a family that is not supported; expected one of {known}"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"got hidden_act {activation!r}, expected 'silu'")
    if config.get("quantization_config"):
        raise UnsupportedModel(
            "got quantised weights (quantization_config), expected the model's original weights"
        )
    return family


def _reasons(config: Mapping[str, Any], kind: object, family: Family | None) -> Iterator[str]:
    """Why a config cannot be served, most telling first."""
    if isinstance(kind, str) and kind in _BY_NAME:
        yield _BY_NAME[kind]
    for name in _EXPERTS:
        if isinstance(count := config.get(name), int) and count > 1:
            yield f"{_MIXTURE} ({name} {count})"
    types = {str(layer) for layer in config.get("layer_types") or ()} - {"full_attention"}
    windows = {layer for layer in types if "sliding" in layer or "chunked" in layer}
    if types - windows:
        yield f"{_HYBRID} (layer_types: {', '.join(sorted(types - windows))})"
    for name in _STATES:
        if config.get(name):
            yield f"{_HYBRID} ({name})"
    window = config.get("sliding_window")
    if windows or (family.slides(config) if family is not None else window):
        named = f"layer_types: {', '.join(sorted(windows))}"
        yield f"{_SLIDING} ({named if window is None else f'sliding_window {window}'})"
    if "vision_config" in config or "text_config" in config:
        yield _PICTURES
