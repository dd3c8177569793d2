"""Scores by means and bounds of chunks, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_targets import CPU

from ckv_jax.kernels_pallas.score import score
from ckv_jax.kernels_pallas.score.probe import BoundKeys, MeanKeys, Probe

CHUNKS, HEADS, KV_HEADS, DIM, CHUNK = 13, 6, 2, 32, 4
GROUP = HEADS // KV_HEADS
TOKENS = 42  # the eleventh chunk is the last, and not whole
LENGTHS = (5, 2)


def make(kind: str, dtype: Any = jnp.float32) -> tuple[jax.Array, Probe, dict[str, np.ndarray]]:
    """Queries (NaN past their length), a probe (NaN past its last chunk), and its arrays."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 5, HEADS, DIM))
    q[1, 2:] = np.nan
    shape = (CHUNKS, KV_HEADS, DIM)
    if kind == "means":
        sizes = np.where(np.arange(CHUNKS) == 10, TOKENS - 40, CHUNK).astype(np.float32)
        sizes[3] = 0  # nobody is in it
        with np.errstate(divide="ignore"):
            log_size = np.log(np.broadcast_to(sizes[:, None], shape[:2]))
        arrays = {"mean": rng.standard_normal(shape), "log_size": log_size}
    else:
        one, other = rng.standard_normal((2, *shape))
        arrays = {"low": np.minimum(one, other), "high": np.maximum(one, other)}
    given = {name: np.array(jnp.asarray(array, dtype)) for name, array in arrays.items()}
    arrays = {name: array.astype(np.float64) for name, array in given.items()}
    for array in given.values():
        array[11:] = np.nan
    if kind == "means":
        given["log_size"] = given["log_size"].astype(np.float32)
        return jnp.asarray(q, dtype), MeanKeys(**jax.tree.map(jnp.asarray, given)), arrays
    return jnp.asarray(q, dtype), BoundKeys(**jax.tree.map(jnp.asarray, given)), arrays


def expected(q: np.ndarray, arrays: dict[str, np.ndarray], num_tokens: int) -> np.ndarray:
    """float64 [B, K, M], a query and a head at a time."""
    out = np.zeros((2, KV_HEADS, CHUNKS))
    chunks = -(-num_tokens // CHUNK)
    for b, h in np.ndindex(2, HEADS):
        for i in range(LENGTHS[b] if chunks else 0):
            query, k = q[b, i, h], h // GROUP
            if "mean" in arrays:
                logits = arrays["mean"][:chunks, k] @ query / np.sqrt(DIM)
                logits = logits + arrays["log_size"][:chunks, k]
            else:
                products = query * arrays["low"][:chunks, k], query * arrays["high"][:chunks, k]
                logits = np.maximum(*products).sum(-1) / np.sqrt(DIM)
            weights = np.exp(logits - logits.max())
            out[b, k, :chunks] += weights / weights.sum()
    return out


def run(q: jax.Array, probe: Probe, num_tokens: int) -> jax.Array:
    call = jax.jit(score, static_argnames=("chunk_tokens", "target"))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    out: jax.Array = call(
        q, probe, num_tokens=jnp.int32(num_tokens), q_lengths=lengths, chunk_tokens=CHUNK,
        target=CPU,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", ["means", "bounds"])
@pytest.mark.parametrize("num_tokens", [TOKENS, 8, 1, 0])
def test_agrees_with_float64(kind: str, num_tokens: int) -> None:
    q, probe, arrays = make(kind)
    wanted = expected(np.asarray(q, np.float64), arrays, num_tokens)
    each = run(q, probe, num_tokens)
    assert each.dtype == jnp.float32 and each.shape == (2, KV_HEADS, CHUNKS)
    np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-6)
    total = HEADS * np.array(LENGTHS) * (num_tokens > 0)
    np.testing.assert_allclose(each.sum((1, 2)), total, rtol=1e-5)


def test_says_what_it_got() -> None:
    q, probe, _ = make("means")
    assert isinstance(probe, MeanKeys)
    with pytest.raises(ValueError, match="got log_size"):
        run(q, MeanKeys(probe.mean, probe.log_size[:, :1]), TOKENS)
    with pytest.raises(ValueError, match="got low"):
        run(q, BoundKeys(probe.mean, probe.mean[:5]), TOKENS)
    with pytest.raises(ValueError, match="got q"):
        run(q[..., :16], probe, TOKENS)
