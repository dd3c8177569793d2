"""Keys moved along the positions: R(p + offset) = R(offset) R(p), pair of dimensions by pair.

That holds where a pair turns by the same angle with every token: plain RoPE, YaRN and Llama 3,
which only change that angle. YaRN's factor on cosines and sines is in the stored keys already
and must not come in twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from ckv_jax.errors import UnsupportedModel
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.rope import inverse_frequencies
from ckv_jax.model.rope_scaling import Llama3Scaling, YarnScaling

_TURNING = (YarnScaling, Llama3Scaling)


def check_rotates(config: ModelConfig) -> None:
    """Raises `UnsupportedModel` for positions whose keys cannot be moved by a rotation."""
    scaling = config.rope_scaling
    if scaling is not None and not isinstance(scaling, _TURNING):
        raise UnsupportedModel(
            f"got rope scaling {type(scaling).__name__}, expected none, yarn or llama3: keys of "
            "other positions cannot be rotated to another place"
        )


def rotations(
    config: ModelConfig, offsets: Sequence[int]
) -> tuple[Float32[np.ndarray, "n D"], Float32[np.ndarray, "n D"]]:
    """The tables that `model.rope.apply_rope` moves keys by so many tokens with, one row each.

    In float64 from the model's own float32 frequencies: at tens of thousands of tokens a float32
    angle is off by a thousandth of a radian.
    """
    frequencies, _ = inverse_frequencies(config)
    angles = np.asarray(offsets, np.float64)[:, None] * frequencies.astype(np.float64)[None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    tables = np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
    return tables[0].astype(np.float32), tables[1].astype(np.float32)
