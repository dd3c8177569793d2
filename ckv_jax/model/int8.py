"""Weights of int8: each row [I] of a kernel, of the embedding and of the head has a scale.

One number of a row is worth its largest over 127. Norms and biases stay as they are. A model takes
half the memory, and a token of decode half the time that its weights take to come from memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int8

from ckv_jax.model.decoder import Transformer
from ckv_jax.model.tensor_map import Slot, tensor_slots

_LEVELS = 127
_TABLES = ("embedding", "head")


def is_int8(slot: Slot) -> bool:
    """Whether a parameter is one of those."""
    return slot.kernel or slot.path[-1] in _TABLES


def scale_path(slot: Slot) -> tuple[str | int, ...]:
    """Where the scales of a parameter's rows are in the module tree."""
    return (*slot.path[:-1], f"{slot.path[-1]}_scale")


def as_int8(model: Transformer) -> Transformer:
    """The same abstract model (`Transformer.abstract`, `out_first`), with weights of int8."""
    for slot in tensor_slots(model.config):
        if not is_int8(slot):
            continue
        node: Any = model
        for key in slot.path[:-1]:
            node = node[key] if isinstance(key, int) else getattr(node, key)
        shape = getattr(node, str(slot.path[-1])).get_value().shape
        codes, scale = jax.eval_shape(rounded, jax.ShapeDtypeStruct(shape, jnp.float32))  # type: ignore[no-untyped-call]
        setattr(node, str(slot.path[-1]), nnx.Param(codes))
        setattr(node, str(scale_path(slot)[-1]), nnx.Param(scale))
    return model


@jax.jit
def rounded(weight: Float[Array, "O I"]) -> tuple[Int8[Array, "O I"], Float32[Array, " O"]]:
    """A weight's numbers, and what one of them is worth in each row."""
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=1) / _LEVELS
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return jnp.rint(wide * inverse[:, None]).astype(jnp.int8), scale
