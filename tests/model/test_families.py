"""Every family computes what transformers computes, from transformers' own checkpoints."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.families import FAMILIES
from ckv_jax.model.weights import load_pretrained
from tests.model.hf_checkpoints import CASES, their_logits, write_checkpoint

TOKENS = 120  # of 128, nearly four times the trained length where RoPE is scaled

forward = nnx.jit(lambda model, tokens: model(tokens))


def test_there_is_a_case_for_every_family() -> None:
    assert {case["model_type"] for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, name)
    model = load_pretrained(tmp_path, dtype="float32")
    size = model.config.vocab_size
    tokens = np.random.default_rng(2).integers(0, size, (2, TOKENS)).astype(np.int32)
    expected = their_logits(theirs, tokens)
    got = np.asarray(forward(model, jnp.asarray(tokens)))
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    assert ModelConfig.from_hf(model.config.to_hf()) == model.config
