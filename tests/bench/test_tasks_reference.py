"""The shipped checkpoint: what transformers makes of it, and its documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from ckv_jax.data import ledger as words
from ckv_jax.data.reference import LEARNED, demo_document, demo_ledger, reference_folder
from ckv_jax.model.tokenizer import load_tokenizer
from ckv_jax.model.weights import load_pretrained


def test_the_folder_is_small_and_complete() -> None:
    files = {file.name: file.stat().st_size for file in reference_folder().iterdir()}
    assert sum(files.values()) <= 20e6
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} <= set(files)
    assert load_tokenizer(reference_folder()).vocab_size == len(words.vocabulary())


def test_transformers_computes_the_same_logits() -> None:
    model = load_pretrained(reference_folder(), dtype="float32")
    page = demo_ledger(0, 256, questions=1)
    tokens = np.concatenate([page.tokens, page.questions[0, : page.lengths[0]]])[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        reference_folder(), dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    ours = np.asarray(jax.jit(lambda m, t: m(t))(model, jnp.asarray(tokens)))
    np.testing.assert_allclose(ours, expected, atol=2e-3 * np.abs(expected).max())


def test_a_demo_document_reads_back() -> None:
    text, asked = demo_document(1, 512, questions=20)
    page = demo_ledger(1, 512, questions=20, asked=LEARNED)
    tokenizer = load_tokenizer(reference_folder())
    assert np.array_equal(tokenizer.encode(text), page.tokens)
    for (question, answer), ids, length, right in zip(
        asked, page.questions, page.lengths, page.answers, strict=True
    ):
        assert np.array_equal(tokenizer.encode(question), ids[:length])
        assert tokenizer.decode([int(right)]).strip() == answer
