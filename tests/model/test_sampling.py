"""Sampling against a plain numpy reference; batch equals one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.errors import CheckpointError
from ckv_jax.model.sampling import SamplingParams, generation_defaults, sample, stack_params

VOCAB = 24


def allowed(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probability of each token, float64 `[V]`, after temperature, top-k and top-p."""
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order].astype(np.float64) / params.temperature
    if params.top_k:
        scaled[params.top_k :] = -np.inf
    share = np.exp(scaled - scaled.max())
    share /= share.sum()
    if params.top_p < 1:
        reached = np.cumsum(share) - share >= params.top_p
        share[reached & (np.arange(len(share)) > 0)] = 0
        share /= share.sum()
    out = np.zeros(len(logits))
    out[order] = share
    return out


def draw(logits: np.ndarray, params: SamplingParams, steps: np.ndarray) -> np.ndarray:
    """Tokens of one request at many steps."""
    rows = jnp.broadcast_to(jnp.asarray(logits)[None], (len(steps), len(logits)))
    return np.asarray(sample(rows, stack_params([params] * len(steps)), jnp.asarray(steps)))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=5),
        SamplingParams(temperature=1.5, top_p=0.7),
        SamplingParams(temperature=1.0, top_k=8, top_p=0.8, seed=2**32 - 1),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=2.0, top_k=1),
    ],
)
def test_frequencies_follow_the_reference(params: SamplingParams) -> None:
    logits = np.random.default_rng(4).normal(0, 1.5, VOCAB).astype(np.float32)
    count = 4096
    tokens = draw(logits, params, np.arange(count, dtype=np.int32))
    expected = allowed(logits, params)
    got = np.bincount(tokens, minlength=VOCAB) / count
    assert not got[expected == 0].any()
    # five standard deviations of a share drawn `count` times
    assert (np.abs(got - expected) <= 5 * np.sqrt(expected / count) + 1e-9).all()


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [7, 3]] = 2.0
    logits[1, 23] = 1.0
    tokens = sample(jnp.asarray(logits), stack_params([SamplingParams()] * 3), jnp.zeros(3, int))
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, [3, 23, 0])


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1.2e-38, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize(
    "cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.9}], ids=str
)
def test_the_coldest_temperatures_take_the_most_likely(
    temperature: float, cut: dict[str, Any]
) -> None:
    logits = np.asarray([-30.0, 29.5, 30.0, 12.0, -np.inf], np.float32)
    steps = np.arange(64, dtype=np.int32)
    tokens = draw(logits, SamplingParams(temperature=temperature, **cut), steps)
    assert set(tokens.tolist()) == {2}


def test_a_cold_temperature_still_draws_among_equals() -> None:
    logits = np.asarray([1e30, 3.0, 1e30], np.float32)
    tokens = draw(logits, SamplingParams(temperature=1e-37), np.arange(64, dtype=np.int32))
    assert set(tokens.tolist()) == {0, 2}


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-37, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    top_k=st.integers(0, VOCAB + 3),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=25, deadline=None)
@given(requests=st.lists(PARAMS, min_size=4, max_size=4), seed=st.integers(0, 1000))
def test_a_batch_equals_one_by_one(requests: list[SamplingParams], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(4, VOCAB)).astype(np.float32)
    steps = np.arange(4, dtype=np.int32)
    batch = sample(jnp.asarray(logits), stack_params(requests), jnp.asarray(steps))
    for i, params in enumerate(requests):
        assert int(batch[i]) == int(draw(logits[i], params, steps[i : i + 1])[0])
        if params.temperature > 0:
            assert allowed(logits[i], params)[int(batch[i])] > 0
        else:
            assert int(batch[i]) == int(np.argmax(logits[i]))


def test_equals_at_the_edge_stay_in() -> None:
    logits = np.asarray([3.0, 1.0, 1.0, 1.0, -9.0], np.float32)
    steps = np.arange(512, dtype=np.int32)
    tokens = draw(logits, SamplingParams(temperature=5.0, top_k=2), steps)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_seeds_and_steps_differ() -> None:
    logits = np.zeros(VOCAB, np.float32)
    steps = np.arange(64, dtype=np.int32)
    one = draw(logits, SamplingParams(temperature=1.0, seed=1), steps)
    again = draw(logits, SamplingParams(temperature=1.0, seed=1), steps)
    other = draw(logits, SamplingParams(temperature=1.0, seed=2), steps)
    np.testing.assert_array_equal(one, again)
    assert len(set(one.tolist())) > 10
    assert (one != other).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed="),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids"),
        ({"stop_token_ids": (2**31,)}, "stop_token_ids"),
        ({"forced_ids": (2**31,)}, "forced_ids"),
        ({"stop": ("",)}, "stop="),
        ({"stop": "end"}, "stop='end'"),
        ({"stop": (5,)}, "stop="),
        ({"stop_token_ids": 5}, "stop_token_ids=5"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids=1.5"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": 1e300}, "temperature=1e"),
        ({"top_p": None}, "top_p=None"),
        ({"top_k": 2**40}, "top_k="),
        ({"seed": 1.5}, "seed=1.5"),
        ({"max_tokens": 2.5}, "max_tokens=2.5"),
        ({"max_tokens": True}, "max_tokens=True"),
    ],
)
def test_bad_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


# -- generation_config.json ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 3}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 50},
        ),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"max_new_tokens": 7, "repetition_penalty": 1.0}, {"max_tokens": 7}),
    ],
)
def test_sampling_is_what_the_file_says(
    values: dict[str, Any] | None, expected: dict[str, Any], tmp_path: Path
) -> None:
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    found = generation_defaults(tmp_path)
    assert found.sampling == SamplingParams(**expected)
    assert found.ignored == {}


def test_what_is_not_built_is_told(tmp_path: Path) -> None:
    values = {"repetition_penalty": 1.05, "num_beams": 1, "min_p": 0.1, "suppress_tokens": [4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    del values["num_beams"]
    assert generation_defaults(tmp_path).ignored == values


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ('{"do_sample": true, "temperature": "hot"}', "generation_config.json.*temperature"),
        ('{"do_sample": true, "top_p": 2}', "top_p"),
        ('{"max_new_tokens": 0}', "max_tokens"),
    ],
)
def test_wrong_settings_are_named(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        generation_defaults(tmp_path)
