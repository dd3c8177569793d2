"""The dense prefill in blocks equals the model's own dense pass."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import SMALL, tokens

from ckv_jax.model.weights import random_model
from ckv_jax.pipeline.layers import Compute
from ckv_jax.pipeline.prefill import DensePrefill


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("length", [1, 31, 32, 100])
def test_logits_equal_the_dense_pass(dtype: str, tolerance: float, length: int) -> None:
    model = random_model(SMALL, dtype=dtype, seed=0)
    prefill = DensePrefill(Compute(model), block=32)
    logits, token = prefill.logits(tokens(length))
    expected = np.asarray(model(jnp.asarray(tokens(length)[None])))[0, -1]
    assert np.abs(np.asarray(logits)[0] - expected).max() < tolerance * np.abs(expected).max()
    assert int(token[0]) == int(np.asarray(logits)[0].argmax())


def test_going_on_from_stored_kv_equals_doing_all() -> None:
    prefill = DensePrefill(Compute(random_model(SMALL, dtype="float32", seed=0)), block=32)
    text = tokens(90)

    def kv(blocks: object) -> np.ndarray:
        return np.concatenate([np.asarray(b.kv)[:, :, : b.length] for b in blocks], axis=2)

    whole = kv(prefill.run(text))
    rest = kv(prefill.run(text[48:], start=48, before=whole[:, :, :48]))
    np.testing.assert_allclose(rest, whole[:, :, 48:], atol=1e-5)


def test_no_tokens_are_refused() -> None:
    prefill = DensePrefill(Compute(random_model(SMALL, dtype="float32", seed=0)), block=32)
    with pytest.raises(ValueError, match="no tokens"):
        prefill.logits(tokens(0))
