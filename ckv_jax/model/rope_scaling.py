"""How RoPE is stretched past the trained length: YaRN, and Llama 3's way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


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
