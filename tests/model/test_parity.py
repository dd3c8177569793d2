"""Our logits are transformers' logits, for every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.families import FAMILIES
from ckv_jax.model.weights import load_pretrained
from tests.model.hf_checkpoints import CASES, YARN, their_logits, write_checkpoint
from tests.model.small import dense

TOKENS = 120  # of 128, nearly four times the trained length where RoPE is scaled
# Of the logits' scale (their largest magnitude). In bfloat16 both sides are about 1e-2 away from
# float32: they round in different places.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
WHOLE_YARN = YARN | {
    "rope_theta": 100.0, "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.8,
    "mscale_all_dim": 0.6, "truncate": False,
}  # fmt: skip
TIED: dict[str, Any] = {"tie_word_embeddings": True, "rope_parameters": YARN}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For models this small, PyTorch's threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_there_is_a_case_for_every_family() -> None:
    assert {case["model_type"] for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "changes", "dtype"),
    [
        *((name, {}, "float32") for name in CASES),
        ("qwen2", {"rope_parameters": WHOLE_YARN, "rms_norm_eps": 1e-5}, "float32"),
        ("qwen2", {}, "bfloat16"),
        ("qwen2", TIED, "bfloat16"),
    ],
    ids=str,
)
def test_equals_transformers(
    name: str, changes: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    theirs = write_checkpoint(tmp_path, name, **changes)
    model = load_pretrained(tmp_path, dtype=dtype)
    size = model.config.vocab_size
    tokens = np.random.default_rng(2).integers(0, size, (2, TOKENS)).astype(np.int32)
    expected = their_logits(theirs.to(getattr(torch, dtype)), tokens)
    got = np.asarray(nnx.jit(dense)(model, jnp.asarray(tokens)))
    assert np.abs(got - expected).max() < TOLERANCE[dtype] * np.abs(expected).max()
    assert ModelConfig.from_hf(model.config.to_hf()) == model.config
