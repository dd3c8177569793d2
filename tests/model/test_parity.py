"""Our logits are transformers' logits: live where torch is installed, else against its answers."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ckv_jax.model.qwen2 import Qwen2
from ckv_jax.model.weights import load_pretrained, save_pretrained
from tests.model.make_goldens import GOLDENS, reference
from tests.model.parity_cases import (
    CASES,
    GREEDY_PROMPT,
    ParityCase,
    greedy,
    parity_model,
    prompt,
)

# Of the logits' scale (their largest magnitude). In bfloat16 both sides are about 1e-2 away from
# float32: they round in different places.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def check(model: Qwen2, case: ParityCase, answers: dict[str, np.ndarray], stride: int) -> None:
    logits = np.asarray(nnx.jit(lambda m, t: m(t))(model, jnp.asarray(prompt(case))))[:, ::stride]
    error = np.abs(logits - answers["logits"]).max() / np.abs(answers["logits"]).max()
    assert error < TOLERANCE[case.dtype]
    if case.dtype == "float32":
        tokens = greedy(model, prompt(case)[:1, :GREEDY_PROMPT])
        np.testing.assert_array_equal(tokens, answers["greedy"])


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_live(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_pretrained(parity_model(case), tmp_path)
    model = load_pretrained(tmp_path, dtype=case.dtype)  # through the file that both sides read
    check(model, case, reference(case, tmp_path), stride=1)


@pytest.mark.parametrize("positions", [32, 128])
def test_yarn_as_qwen_documents_it_reaches_past_the_trained_length(
    positions: int, tmp_path: Path
) -> None:
    import torch
    from transformers import Qwen2ForCausalLM

    save_pretrained(parity_model(CASES["gqa"]), tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"}
    values |= {"rope_theta": 1e6, "rope_scaling": yarn, "max_position_embeddings": positions}
    path.write_text(json.dumps(values))

    model = load_pretrained(tmp_path, dtype="float32")
    assert model.config.max_position_embeddings == 128
    tokens = np.random.default_rng(2).integers(0, 160, (1, 120)).astype(np.int32)
    theirs = Qwen2ForCausalLM.from_pretrained(
        str(tmp_path), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    got = np.asarray(nnx.jit(lambda m, t: m(t))(model, jnp.asarray(tokens)))
    assert np.abs(got - expected).max() < TOLERANCE["float32"] * np.abs(expected).max()


@pytest.mark.parametrize("name", CASES)
def test_equals_goldens(name: str) -> None:
    with np.load(GOLDENS) as goldens:
        answers = {key: goldens[f"{name}.{key}"] for key in ("logits", "greedy")
                   if f"{name}.{key}" in goldens}  # fmt: skip
    check(parity_model(CASES[name]), CASES[name], answers, stride=4)
