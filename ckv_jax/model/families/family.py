"""Family: the settings in which one model family differs from the others, besides sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "layer": "model.layers.{}",
        "input_norm": "input_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "post_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
)
"""Names of a model's parts in this package, mapped to Hugging Face's names in most families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of decoder-only models, as settings of the common decoder layer."""

    model_type: str
    """Name of the family in `config.json`."""
    title: str
    """Name of the family in messages."""
    architecture: str
    """Class of transformers that loads a saved checkpoint."""
    names: Mapping[str, str]
    """Parts of the model, mapped to HF's names; with `query_norm` and `key_norm` if it has them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """HF's defaults for fields that `config.json` omits, where they depend on the family."""
    always_biased: bool = False
    """Whether queries, keys and values have biases without the config saying so."""
    bias_switches: tuple[str, ...] = ()
    """Which of the config fields `attention_bias` and `mlp_bias` the family supports."""
    slides: Callable[[Mapping[str, Any]], bool] = lambda config: False
    """Whether a config of the family, `defaults` filled in, has a layer with a sliding window."""
    gguf: str | None = None
    """llama.cpp's name of the architecture; None: no GGUF file names this family."""
    gguf_pairs: bool = False
    """Whether llama.cpp rotates neighbouring dimensions, for which it reorders queries and keys."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a saved `config.json` that HF needs to compute the same."""

    @property
    def query_key_norm(self) -> bool:
        """Whether each head's queries and keys are normalised before they are rotated."""
        return "query_norm" in self.names
