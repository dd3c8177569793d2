"""A real instruct model, from its GGUF file, against transformers' reading of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ckv_jax import Engine, EngineConfig, Request, SamplingParams
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.model.weights import load_pretrained
from tests.model.hf_checkpoints import their_logits
from tests.model.small import dense
from tests.real_model import smollm2_in_transformers

TEXTS = (
    "The capital of France is Paris, and has been for a thousand years.",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))",
    "größer 漢字 🙂 naïve café",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
)
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    return smollm2_in_transformers(smollm2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_logits_are_transformers(
    smollm2: Path, tokenizer: Tokenizer, theirs: Any, optimised: None
) -> None:
    tokens = tokenizer.encode(" ".join(TEXTS))[None]
    expected = their_logits(theirs, tokens)
    model = load_pretrained(smollm2, dtype="float32")
    got = np.asarray(nnx.jit(dense)(model, jnp.asarray(tokens)))
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_ids_and_chat_are_transformers(smollm2: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    original = PreTrainedTokenizerFast.from_pretrained(
        str(smollm2.parent), gguf_file=smollm2.name, local_files_only=True
    )
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert ids == original.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    expected = original.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat(MESSAGES) == expected
    assert len(tokenizer._backend) == len(original)
    assert tokenizer._backend.eos_token_id == original.eos_token_id


def test_each_digit_is_a_word(tokenizer: Tokenizer) -> None:
    """SmolLM's tokenizer.json splits before digits first, which the GPT-2 split does not."""
    ids = tokenizer.encode("cost  12")
    assert [tokenizer.decode([one]) for one in ids] == ["cost", "  ", "1", "2"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_the_engine_answers_as_transformers(
    smollm2: Path, theirs: Any, tmp_path: Path, optimised: None
) -> None:
    import torch

    config = EngineConfig(budget=1.0, dtype="float32")
    with Engine.from_pretrained(smollm2, store=tmp_path / "kv", config=config) as engine:
        prompt = engine.tokenizer.apply_chat(MESSAGES)
        at = prompt.index("What")
        prefix = engine.ingest(prompt[:at], raw=True)
        request = Request(prefix=prefix, suffix=prompt[at:])
        (generation,) = engine.generate(request, SamplingParams(max_tokens=12)).results()
        ids = torch.tensor([engine.tokenizer.encode(prompt).tolist()])
    expected = theirs.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    assert generation.token_ids.tolist() == expected.tolist()
