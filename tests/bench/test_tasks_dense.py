"""Dense passes agree with the model."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.common import interval
from bench.tasks.batches import ledger_batch, repeats
from bench.tasks.dense import answer_logits, join, split, text_logits
from bench.tasks.initial import initial
from bench.tasks.suffixes import lengthened
from ckv_jax.data import words
from ckv_jax.data.ledger import make_ledger
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer

_CONFIG = ModelConfig(
    vocab_size=len(words.vocabulary()),
    hidden_size=64,
    intermediate_size=64,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return join(initial(_CONFIG, 0), _CONFIG, dtype="float32")


dense = nnx.jit(lambda model, tokens: model(tokens))


def test_stacked_layers_compute_what_the_model_does(model: Transformer) -> None:
    tokens = jnp.asarray(repeats(np.random.default_rng(0), 2, 24).tokens)
    ours = text_logits(split(model), _CONFIG, tokens)
    np.testing.assert_allclose(ours, dense(model, tokens), rtol=1e-4, atol=1e-4)


def test_a_question_sees_its_prefix_and_itself_alone(model: Transformer) -> None:
    batch = ledger_batch(np.random.default_rng(2), 1, 256, 5)
    ours = answer_logits(split(model), _CONFIG, batch.tokens, batch.questions, batch.lengths)
    for i, length in enumerate(batch.lengths[0]):
        text = np.concatenate([batch.tokens[0], batch.questions[0, i]])[None]  # padded at the end
        last = dense(model, text)[0, len(batch.tokens[0]) + length - 1]
        np.testing.assert_allclose(ours[0, i], last, rtol=1e-3, atol=1e-3)


def test_intervals_hold_the_share() -> None:
    low, high = interval(48, 50)
    assert low < 0.96 < high and (low, high) == pytest.approx((0.865, 0.989), abs=2e-3)


def test_a_longer_suffix_ends_with_the_question() -> None:
    page = make_ledger(np.random.default_rng(7), 256, questions=6)
    long = lengthened(page, 32)
    assert long.questions.shape == (6, 32) and (long.lengths == 32).all()
    for row, question, length in zip(long.questions, page.questions, page.lengths, strict=True):
        assert np.array_equal(row[32 - length :], question[:length])
        assert row[31 - length] == words.WORD_IDS["."]
    with pytest.raises(ValueError, match="got suffixes of 2 tokens"):
        lengthened(page, 2)
