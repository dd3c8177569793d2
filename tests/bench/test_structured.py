"""Structured weights: the compute of any other model."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from bench.common import SHAPES
from bench.structured import structured_model
from ckv_jax.model.weights import random_model

CONFIG = SHAPES["tiny"]


def shapes(model: nnx.Module) -> object:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(nnx.state(model)))


def test_shapes_and_dtypes_are_those_of_a_random_model() -> None:
    structured = structured_model(CONFIG, seed=1)
    assert shapes(structured) == shapes(random_model(CONFIG, seed=1))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(structured)))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves)
