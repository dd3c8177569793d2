"""ModelConfig: the shape of one Qwen2.5 model, read from and written to HF's `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckv_jax.errors import CheckpointError, UnsupportedModel

__all__ = ["PUBLISHED", "ModelConfig", "RopeScaling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN context extension (arXiv 2309.00071), with HF's names and HF's defaults."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # multiplies cos and sin; None: from factor and mscale
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the ramp's ends to whole dimensions

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"got a rope factor of {self.factor}, expected at least 1")
        if self.original_max_position_embeddings < 1:
            got = self.original_max_position_embeddings
            raise ValueError(f"got original_max_position_embeddings {got}, expected at least 1")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], *, max_positions: int) -> RopeScaling:
        """Read the yarn entry of `rope_parameters` or `rope_scaling`."""
        known = {name: values[name] for name in cls.__slots__ if values.get(name) is not None}
        known.setdefault("original_max_position_embeddings", max_positions)
        original = known["original_max_position_embeddings"]
        known.setdefault("factor", max_positions / original)
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        """The entry that `from_hf` reads back, without the fields left open."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Qwen2.5 model's shape: grouped-query attention with QKV bias, SwiGLU MLP, RoPE, RMSNorm.

    Hashable, so it can be a static jit argument.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_type: str = "qwen2"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 32768  # positions that may be used, stretched ones included
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()  # generation stops at any of these

    def __post_init__(self) -> None:
        if self.model_type != "qwen2":
            raise UnsupportedModel(f"got model_type {self.model_type!r}, expected 'qwen2'")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"got {name} {value}, expected more than 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"got {self.num_heads} query heads over {self.num_kv_heads} KV heads, "
                "expected a whole number of query heads for each KV head"
            )
        if self.head_dim % 2:
            raise ValueError(f"got head_dim {self.head_dim}, expected an even number (RoPE pairs)")

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Read HF's config: a dict, a `config.json`, or the folder that holds one.

        Both spellings are honoured: transformers 5 (`rope_parameters`) and 4 (`rope_theta`,
        `rope_scaling`). YaRN allows `factor` times the original positions, whatever
        `max_position_embeddings` says: Qwen's own instructions leave it unstretched. The
        end-of-text ids are those of the config and of a `generation_config.json` beside it.

        Raises `CheckpointError` for a file that is missing or incomplete and `UnsupportedModel`,
        with the reason, for a config this model would compute wrongly.
        """
        values, generation = _read(source)
        _refuse_unsupported(values)
        try:
            heads = int(values["num_attention_heads"])
            hidden = int(values["hidden_size"])
            positions = int(values.get("max_position_embeddings", 32768))
            theta, scaling = _read_rope(values, positions)
            if scaling is not None:
                positions = int(scaling.factor * scaling.original_max_position_embeddings)
            ends = [*_token_ids(values), *_token_ids(generation)]
            return cls(
                vocab_size=int(values["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(values["intermediate_size"]),
                num_layers=int(values["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(values.get("num_key_value_heads") or heads),
                head_dim=int(values.get("head_dim") or hidden // heads),
                rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
                rope_theta=theta,
                rope_scaling=scaling,
                max_position_embeddings=positions,
                tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
                eos_token_ids=tuple(dict.fromkeys(ends)),
            )
        except KeyError as error:
            raise CheckpointError(f"the config lacks {error.args[0]!r}") from error
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the config does not describe a model: {error}") from error

    def to_hf(self, *, dtype: str = "bfloat16") -> dict[str, Any]:
        """HF's `config.json` as transformers 5 writes it; `dtype` is that of the saved weights."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "yarn"} | self.rope_scaling.to_hf()
        eos = self.eos_token_ids
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_sliding_window": False,
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "dtype": dtype,
        }


_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings",
)  # fmt: skip


def _read(
    source: Mapping[str, Any] | str | Path,
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The config, and the generation config where there is one."""
    if isinstance(source, Mapping):
        return source, {}
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise CheckpointError(f"not a checkpoint: there is no {path}")
    generation = path.with_name("generation_config.json")
    return _read_json(path), _read_json(generation) if generation.is_file() else {}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, expected an object")
    return values


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Everything that would change the computation and is not built here."""
    kind = values.get("model_type")
    if kind != "qwen2":
        raise UnsupportedModel(f"got model_type {kind!r}, expected 'qwen2' (Qwen2 and Qwen2.5)")
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"got hidden_act {activation!r}, expected 'silu'")
    layers = values.get("num_hidden_layers", 0)
    slides = bool(values.get("use_sliding_window")) and values.get("sliding_window") is not None
    types = values.get("layer_types")
    if types is not None:
        active = any(kind != "full_attention" for kind in types)
    else:
        active = slides and values.get("max_window_layers", 28) < layers
    if active:
        raise UnsupportedModel(
            "sliding window attention is active in this config "
            f"(sliding_window {values.get('sliding_window')}); only full attention is supported"
        )
    if values.get("quantization_config"):
        raise UnsupportedModel("the weights are quantised (quantization_config); use the originals")


def _read_rope(values: Mapping[str, Any], positions: int) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling from either spelling; transformers' own default base is 10,000."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    theta = float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise UnsupportedModel(f"got partial_rotary_factor {share}, expected 1")
    if kind == "default":
        return theta, None
    if kind == "yarn":
        return theta, RopeScaling.from_hf(rope, max_positions=positions)
    raise UnsupportedModel(f"got rope type {kind!r}, expected 'default' or 'yarn'")


def _token_ids(values: Mapping[str, Any]) -> list[int]:
    """`eos_token_id`: absent, one id, or a list of them."""
    found = values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"got eos_token_id {found!r}, expected a token id or a list of them")
    return ids


def _qwen25(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool, vocab: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        tie_word_embeddings=tied,
        eos_token_ids=(151645, 151643),
    )


# The instruction-tuned models as published, and one thin model with the KV shape of 7B.
PUBLISHED: dict[str, ModelConfig] = {
    "0.5B": _qwen25(896, 4864, 24, 14, 2, tied=True, vocab=151936),
    "1.5B": _qwen25(1536, 8960, 28, 12, 2, tied=True, vocab=151936),
    "3B": _qwen25(2048, 11008, 36, 16, 2, tied=True, vocab=151936),
    "7B": _qwen25(3584, 18944, 28, 28, 4, tied=False, vocab=152064),
    "14B": _qwen25(5120, 13824, 48, 40, 8, tied=False, vocab=152064),
    "32B": _qwen25(5120, 27648, 64, 40, 8, tied=False, vocab=152064),
    "72B": _qwen25(8192, 29568, 80, 64, 8, tied=False, vocab=152064),
    "kv7b-thin": ModelConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=28,
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
    ),
}
