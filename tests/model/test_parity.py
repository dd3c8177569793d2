"""Our logits are transformers' logits, and so are the tokens that they choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from ckv_jax.model.weights import load_pretrained, save_pretrained
from tests.model.parity_cases import (
    CASES,
    GREEDY_PROMPT,
    GREEDY_TOKENS,
    TOKENS,
    ParityCase,
    parity_model,
    prompt,
)

# Of the logits' scale (their largest magnitude). In bfloat16 both sides are about 1e-2 away from
# float32: they round in different places.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For models this small, PyTorch's threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference(case: ParityCase, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[2, TOKENS, V]` float32 and greedy tokens `[GREEDY_TOKENS]`, by transformers."""
    model = theirs(folder, case.dtype)
    tokens = torch.from_numpy(prompt(case)).long()
    text = tokens[:1, :GREEDY_PROMPT]
    with torch.no_grad():
        for _ in range(GREEDY_TOKENS):
            best = model(text).logits[:, -1:].argmax(-1)
            text = torch.cat([text, best], dim=1)
        logits: np.ndarray = model(tokens).logits.float().numpy()
    return logits, text[0, GREEDY_PROMPT:].numpy()


def theirs(folder: Path, dtype: str) -> Any:
    return transformers.Qwen2ForCausalLM.from_pretrained(
        str(folder), dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_pretrained(parity_model(case), tmp_path)
    model = load_pretrained(tmp_path, dtype=case.dtype)  # through the file that both sides read
    assert model.config == case.config
    expected, greedy = reference(case, tmp_path)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    logits = np.asarray(forward(model, jnp.asarray(prompt(case))))
    assert np.abs(logits - expected).max() < TOLERANCE[case.dtype] * np.abs(expected).max()
    if case.dtype == "float32":
        tokens = prompt(case)
        for at in range(GREEDY_PROMPT, TOKENS):
            tokens[0, at] = int(forward(model, jnp.asarray(tokens))[0, at - 1].argmax())
        np.testing.assert_array_equal(tokens[0, GREEDY_PROMPT:], greedy)


@pytest.mark.parametrize("positions", [32, 128])
def test_yarn_as_qwen_documents_it_reaches_past_the_trained_length(
    positions: int, tmp_path: Path
) -> None:
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
    with torch.no_grad():
        expected = theirs(tmp_path, "float32")(torch.from_numpy(tokens).long()).logits.numpy()
    got = np.asarray(nnx.jit(lambda m, t: m(t))(model, jnp.asarray(tokens)))
    assert np.abs(got - expected).max() < TOLERANCE["float32"] * np.abs(expected).max()
