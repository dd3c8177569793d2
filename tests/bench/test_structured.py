"""Structured weights: the compute of any other model, and selections that mean something."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from bench.common import SHAPES, Setting
from bench.lab import Lab
from bench.similarity import layer_matrix, period_coverage, selections, share
from bench.structured import Structure, structured_model
from ckv_jax.model.weights import random_model

CONFIG = SHAPES["tiny"]


def shapes(model: nnx.Module) -> object:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(nnx.state(model)))


def test_shapes_and_dtypes_are_those_of_a_random_model() -> None:
    structured = structured_model(CONFIG, seed=1)
    assert shapes(structured) == shapes(random_model(CONFIG, seed=1))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(structured)))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves)


def test_too_many_features_are_refused() -> None:
    with pytest.raises(ValueError, match="33 features"):
        structured_model(CONFIG, structure=Structure(features=33))


def test_share_of_one_selection_in_another() -> None:
    assert share(np.array([1, 2, 3, 4]), np.array([2, 4, 9])) == 0.5
    assert share(np.array([], int), np.array([2])) == 0.0
    steps = [np.array([0, 1]), np.array([1, 2]), np.array([2, 3]), np.array([2, 9])]
    matrix = layer_matrix([steps])
    np.testing.assert_allclose(matrix[0], [1, 0.5, 0, 0])
    assert period_coverage(matrix, 2) == 0.0
    assert period_coverage(matrix, 1) == pytest.approx(0.5)


def test_layers_agree_more_than_chance_and_less_than_always(tmp_path: Path) -> None:
    setting = dataclasses.replace(
        Setting(), model="tiny", prefix_tokens=1024, prefixes=1, repeats=2, folder=tmp_path
    )
    with Lab(setting) as lab:
        found = selections(lab, 0.1)
    assert not list(tmp_path.iterdir())  # nothing is left behind
    matrix = layer_matrix(found)
    near, far = matrix[1, 0], matrix[2, 0]
    assert 0.2 < near < 1.0
    assert far <= near
