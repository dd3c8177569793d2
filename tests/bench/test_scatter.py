"""Scatter of important tokens: amplification by hand, and choices read off real calls."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench.common import Setting
from bench.lab import Lab
from bench.measure import measured
from bench.scatter import amplification, chosen, scatter
from bench.similarity import beside, by_distance
from ckv_jax.systems import SYSTEMS

PLAIN = dataclasses.replace(SYSTEMS["impress"], reorder_every=0)


def test_amplification_counts_whole_chunks() -> None:
    tokens = np.zeros((1, 2, 10), bool)
    tokens[0, 0, [0, 9]] = True  # two chunks of 4
    tokens[0, 1, [4, 5]] = True  # one
    assert amplification(tokens, None, 4) == pytest.approx(3 * 4 / 4)
    shared = np.array([0, 9, 4, 5, 1, 2, 3, 6, 7, 8])
    assert amplification(tokens, shared, 4) == pytest.approx(2 * 4 / 4)
    by_layer = np.stack([shared, np.roll(shared, -2)])
    assert amplification(tokens, by_layer, 4) == pytest.approx(2 * 4 / 4)


def test_choices_are_those_that_were_read(tmp_path: Path) -> None:
    setting = Setting(
        model="tiny", prefix_tokens=512, prefixes=1, repeats=2, budgets=(0.1,), folder=tmp_path
    )
    with Lab(setting) as lab:
        with lab.engine(PLAIN) as engine:
            found = chosen(lab, engine, 3, 0.1)
            sample = measured(lab, engine, 0, 3, 0.1)
            asked = [chosen(lab, engine, question, 0.1) for question in range(2)]
        row = scatter(lab, 0.1)
        layers = lab.config.num_layers
    assert found.tokens.shape == found.importance.shape == (layers, 512)
    assert (found.tokens.sum(1) == 52).all()  # a tenth of 512, rounded up
    np.testing.assert_allclose(found.importance.sum(1), 1.0, rtol=1e-5)
    assert sample.fell_back == found.fell_back
    if not found.fell_back:  # else all keys were read as well
        read = amplification(found.tokens[None], None, 64)
        assert sample.read_amplification == pytest.approx(read)
    assert row["amplification"] >= row["reordered"] >= 1.0
    assert row["saved"] == pytest.approx(row["amplification"] / row["reordered"])
    assert row["fallback_share"] == np.mean([one.fell_back for one in asked]) / layers
    assert row["jaccard"] == pytest.approx(np.mean([one.agreement for one in asked]))
    assert not all((one.agreement == 1).all() for one in asked)  # heads differ, or it says nothing


def test_ours_stand_beside_what_is_published() -> None:
    row = {
        "budget": 0.1,
        "coverage": {"8": 0.6},
        "loaded": {"share_of_impress": 0.06},
        "scatter": {"saved": 1.2, "jaccard": 0.5, "amplification": 10.0},
    }
    lines = {line[0]: line[2:5] for line in beside([row])}
    assert lines["coverage between periods of 8"] == [0.6, 0.52, 0.64]
    assert lines["Jaccard index of heads"] == [0.5, 0.48, 0.48]
    assert "amplification" not in lines  # published at 50% alone


def test_similarity_by_distance() -> None:
    matrix = np.array([[1.0, 0.8, 0.2], [0.8, 1.0, 0.6], [0.2, 0.6, 1.0]])
    assert by_distance(matrix, 1) == pytest.approx(0.7)
    assert by_distance(matrix, 2) == pytest.approx(0.2)
    assert by_distance(matrix, 3) is None  # no two layers are so far apart
