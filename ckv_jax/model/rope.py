"""Rotary position embedding: inverse frequencies, scaling past the trained length (YaRN, Llama 3),
and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from ckv_jax.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN context extension (arXiv 2309.00071), with HF's names and HF's defaults."""

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # multiplies cos and sin; None: from factor and mscale
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the ramp's ends to whole dimensions

    def __post_init__(self) -> None:
        _check_reach(self.factor, self.original_max_position_embeddings)

    def positions(self, stated: int) -> int:
        """How many may be used: Qwen's own instructions leave the stated number unstretched."""
        del stated
        return int(self.factor * self.original_max_position_embeddings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's context extension, `rope_type` llama3, with HF's names.

    Pairs that turn more than `high_freq_factor` times within the trained length stay as they are,
    those that turn less than `low_freq_factor` times are slowed by `factor`, and between the two
    it passes evenly from one to the other.
    """

    rope_type: ClassVar[str] = "llama3"

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_reach(self.factor, self.original_max_position_embeddings)
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"got low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}, expected the first to be more than 0 and less than the "
                "second"
            )

    def positions(self, stated: int) -> int:
        """How many may be used: as many as the config states."""
        return stated

    def share_kept(self, fast: np.ndarray) -> np.ndarray:
        """How much of its speed each pair keeps, from 0 to 1; `fast` and result float32 [D/2]."""
        turns = fast * np.float32(self.original_max_position_embeddings / (2 * math.pi))
        low, high = np.float32(self.low_freq_factor), np.float32(self.high_freq_factor)
        share: np.ndarray = np.clip((turns - low) / (high - low), 0, 1)
        return share


RopeScaling = YarnScaling | Llama3Scaling


def scaling_from_hf(kind: str, values: Mapping[str, Any], *, positions: int) -> RopeScaling:
    """Read the entry `rope_parameters` or `rope_scaling` of `rope_type` yarn or llama3.

    `positions`: what the config states, the trained length where a yarn entry names none. Raises
    `KeyError` for what an entry lacks and `ValueError` for what it cannot mean.
    """
    if kind == Llama3Scaling.rope_type:
        return Llama3Scaling(**{name: values[name] for name in Llama3Scaling.__slots__})
    known = {name: values[name] for name in YarnScaling.__slots__ if values.get(name) is not None}
    known.setdefault("original_max_position_embeddings", positions)
    known.setdefault("factor", positions / known["original_max_position_embeddings"])
    return YarnScaling(**known)


def scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """The entry that `scaling_from_hf` reads back, without the fields left open."""
    values = {name: getattr(scaling, name) for name in scaling.__slots__}
    given = {name: value for name, value in values.items() if value is not None}
    return {"rope_type": scaling.rope_type} | given


def _check_reach(factor: float, trained: int) -> None:
    if not 1 <= factor < math.inf:
        raise ValueError(f"got a rope factor of {factor}, expected at least 1")
    if trained < 1:
        raise ValueError(f"got original_max_position_embeddings {trained}, expected at least 1")


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians a token for each pair of dimensions, and the factor on cos and sin.

    Returns `(float32 [D/2], factor)`. Plain RoPE has factor 1. YaRN (arXiv 2309.00071, §3) and
    Llama 3 keep fast pairs, divide slow ones by the scaling factor, and pass from one to the
    other between: YaRN evenly over the pairs' indices, Llama 3 over their turns within the
    trained length. The numbers follow transformers, so that the same config gives the same
    rotation.
    """
    dim = config.head_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    periods = np.float32(config.rope_theta) ** exponents
    fast = np.float32(1) / periods
    scaling = config.rope_scaling
    if scaling is None:
        return fast, 1.0
    slow = np.float32(1) / (np.float32(scaling.factor) * periods)
    if isinstance(scaling, Llama3Scaling):
        keep = scaling.share_kept(fast)
        return slow * (1 - keep) + fast * keep, 1.0
    keep = 1 - _ramp(*_ramp_ends(scaling, dim, config.rope_theta), dim // 2)
    return slow * (1 - keep) + fast * keep, _attention_factor(scaling)


def rope_tables(
    config: ModelConfig, positions: Int[Array, "B S"]
) -> tuple[Float[Array, "B S D"], Float[Array, "B S D"]]:
    """Cosines of every position, twice, and sines, negative for the first half; float32."""
    frequencies, factor = inverse_frequencies(config)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    # Without the barrier XLA fuses cosines into every head of every layer that uses them.
    tables: tuple[Array, Array] = jax.lax.optimization_barrier(  # type: ignore[no-untyped-call]
        (jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1))
    )
    return tables


def apply_rope(
    x: Float[Array, "B S H D"], cos: Float[Array, "B S D"], sin: Float[Array, "B S D"]
) -> Float[Array, "B S H D"]:
    """Rotate dimension d against d + D/2 (HF's halves, not neighbours); float32 in and out.

    The halves are swapped by a roll, which XLA's CPU backend fuses into one vectorised loop: of a
    reversal of halves it makes a loop over single elements, three times as slow.
    """
    cos, sin = (jnp.broadcast_to(t[:, :, None, :], x.shape) for t in (cos, sin))
    return x * cos + jnp.roll(x, x.shape[-1] // 2, axis=-1) * sin


def _attention_factor(scaling: YarnScaling) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)


def _ramp_ends(scaling: YarnScaling, dim: int, theta: float) -> tuple[float, float]:
    """The pair indices between which YaRN passes from keeping to dividing."""

    def turns_at(rotations: float) -> float:
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_at(scaling.beta_fast), turns_at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def _ramp(low: float, high: float, size: int) -> np.ndarray:
    high = high + 0.001 if low == high else high
    index = np.arange(size, dtype=np.float32)
    ramp: np.ndarray = np.clip((index - np.float32(low)) / np.float32(high - low), 0, 1)
    return ramp
