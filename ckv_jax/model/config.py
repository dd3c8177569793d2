"""ModelConfig: the architecture of one model, read from and written to HF's `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckv_jax.errors import CheckpointError, UnsupportedModel
from ckv_jax.model.checkpoint import CONFIG, not_a_checkpoint
from ckv_jax.model.families import FAMILIES, Family, family_of
from ckv_jax.model.gguf import GgufModel, is_gguf
from ckv_jax.model.rope import RopeScaling, scaling_from_hf, scaling_to_hf


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model's shape: grouped-query attention, SwiGLU MLP, RoPE, RMSNorm, as its family has them.

    Hashable, so it can be a static jit argument.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_type: str = "qwen2"  # of `FAMILIES`
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 32768  # positions that may be used, stretched ones included
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # HF's switch: biases on all four projections of attention
    mlp_bias: bool = False  # HF's switch: biases on all three projections of the MLP
    eos_token_ids: tuple[int, ...] = ()  # generation stops at any of these

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UnsupportedModel(f"got model_type {self.model_type!r}, expected one of {known}")
        for name in ("attention_bias", "mlp_bias"):
            if getattr(self, name) and name not in self.family.bias_switches:
                raise ValueError(f"got {name}, which {self.family.title} models do not have")
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

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.family.always_biased or self.attention_bias

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Read HF's config: a dict, a `config.json`, or the folder that holds one; or a GGUF file.

        Both spellings are honoured: transformers 5 (`rope_parameters`) and 4 (`rope_theta`,
        `rope_scaling`). YaRN allows `factor` times the original positions, whatever
        `max_position_embeddings` says: Qwen's own instructions leave it unstretched. The
        end-of-text ids are those of the config and of a `generation_config.json` in its folder.

        Raises `CheckpointError` for a file that is missing or incomplete and `UnsupportedModel`,
        with the reason, for a config this model would compute wrongly.
        """
        values, generation = _read(source)
        try:
            family = family_of(values)
            values = {**family.defaults, **values}
            heads = int(values["num_attention_heads"])
            hidden = int(values["hidden_size"])
            positions = int(values.get("max_position_embeddings", 32768))
            theta, scaling = _read_rope(values, positions)
            if scaling is not None:
                positions = scaling.positions(positions)
            ends = [*_token_ids(values), *_token_ids(generation)]
            return cls(
                vocab_size=int(values["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(values["intermediate_size"]),
                model_type=family.model_type,
                num_layers=int(values["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(values.get("num_key_value_heads") or heads),
                head_dim=int(values.get("head_dim") or hidden // heads),
                rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
                rope_theta=theta,
                rope_scaling=scaling,
                max_position_embeddings=positions,
                tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
                **{name: bool(values.get(name, False)) for name in family.bias_switches},
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
            rope |= scaling_to_hf(self.rope_scaling)
        eos = self.eos_token_ids
        return {
            "architectures": [self.family.architecture],
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
            **self.family.written,
            **{name: getattr(self, name) for name in self.family.bias_switches},
            "eos_token_id": None if not eos else eos[0] if len(eos) == 1 else list(eos),
            "dtype": dtype,
        }


def check_weights(weights: str | None, dtype: str, devices: int) -> None:
    """Raises `ValueError` for weights that do not exist, or not in `dtype` over `devices`."""
    if weights not in (None, "int8"):
        raise ValueError(f"got weights={weights!r}, expected 'int8' or None")
    if weights and (dtype != "bfloat16" or devices != 1):
        raise ValueError(
            f"got weights={weights!r} with dtype={dtype!r} and tensor_parallel={devices}, "
            "expected bfloat16 on one device"
        )


_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings",
)  # fmt: skip


def _read(source: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The config, and the generation config where there is one."""
    if isinstance(source, Mapping):
        return source, {}
    path = Path(source)
    if is_gguf(path):
        return GgufModel(path).config(), {}
    given = path
    path = path / CONFIG if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        raise not_a_checkpoint(given)
    return _read_json(path), read_generation_config(path.parent)


def read_generation_config(folder: Path) -> Mapping[str, Any]:
    """A checkpoint folder's `generation_config.json`; empty where there is none.

    Raises `CheckpointError` for a file that holds no JSON object.
    """
    path = folder / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, expected an object")
    return values


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
    if kind in ("yarn", "llama3"):
        return theta, scaling_from_hf(kind, rope, positions=positions)
    raise UnsupportedModel(f"got rope type {kind!r}, expected 'default', 'yarn' or 'llama3'")


def _token_ids(values: Mapping[str, Any]) -> list[int]:
    """`eos_token_id`: absent, one id, or a list of them."""
    found = values.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"got eos_token_id {found!r}, expected a token id or a list of them")
    return ids
