"""Keys in the basis of their principal components: what they keep, and how they are scored."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_targets import BEST, CPU

from ckv_jax.kernels_pallas.score import score
from ckv_jax.kernels_pallas.score.probe import Int4Keys, TurnedKeys, turn
from ckv_jax.kernels_pallas.target import Implementation

TOKENS, REAL, HEADS, DIM, CHUNK = 208, 199, 2, 16, 16


def int4_keys(rank: int, seed: int = 0) -> tuple[Int4Keys, np.ndarray]:
    """A probe whose keys differ along `rank` directions a head, and these keys [T, K, D]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-7, 8, (TOKENS, HEADS, rank))
    nibbles = np.concatenate([codes, np.zeros((TOKENS, HEADS, DIM - rank), int)], axis=2)
    order = rng.permutation(DIM)
    nibbles = nibbles[..., order] + 8
    packed = nibbles[..., : DIM // 2] | (nibbles[..., DIM // 2 :] << 4)
    scale = rng.uniform(0.1, 0.3, (TOKENS, HEADS)).astype(np.float32)
    scale[REAL:] = 0  # as padding has it
    probe = Int4Keys(jnp.asarray(packed, jnp.uint8), jnp.asarray(scale))
    return probe, (nibbles - 8) * scale[..., None]


def kept(turned: TurnedKeys) -> np.ndarray:
    """The keys [T, K, D] that turned ones stand for."""
    codes = np.asarray(turned.codes, np.float64) * np.asarray(turned.scale)[..., None]
    return np.einsum("ktr,kdr->tkd", codes, np.asarray(turned.basis, np.float64))


def test_keys_of_few_directions_lose_only_their_rounding() -> None:
    probe, keys = int4_keys(rank=5)
    turned = turn(probe, dims=8)
    assert turned.shape == probe.shape and turned.codes.shape == (HEADS, TOKENS, 8)
    basis = np.asarray(turned.basis)
    np.testing.assert_allclose(basis.swapaxes(1, 2) @ basis, [np.eye(8)] * HEADS, atol=1e-5)
    half = np.asarray(turned.scale).T / 2  # of a unit, in each of the eight dims
    error = np.linalg.norm(kept(turned) - keys, axis=2)
    assert (error <= half * np.sqrt(8) * 1.01 + 1e-6).all()
    few = turn(probe, dims=3)
    assert np.linalg.norm(kept(few) - keys) > 10 * np.linalg.norm(kept(turned) - keys)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_scores_are_equation_1_over_them(implementation: Implementation) -> None:
    if implementation == "cpu" and BEST.path is None:
        pytest.skip(BEST.refused)
    rng = np.random.default_rng(1)
    turned = turn(int4_keys(rank=DIM)[0], dims=8)
    keys = kept(turned)[:REAL]
    q = rng.standard_normal((2, 3, 4, DIM)).astype(np.float32)
    lengths = np.array([3, 1], np.int32)
    q[1, 1:] = np.nan
    found = score(
        jnp.asarray(q), turned, num_tokens=jnp.int32(REAL), q_lengths=jnp.asarray(lengths),
        chunk_tokens=CHUNK, target=CPU, implementation=implementation,
    )  # fmt: skip
    expected, bound = np.zeros((2, HEADS, TOKENS)), 0.0
    for row, head in np.ndindex(2, 4):
        basis = np.asarray(turned.basis[head // 2], np.float64)
        for at in range(lengths[row]):
            wide = q[row, at, head] @ basis
            logits = keys[:, head // 2] @ q[row, at, head] / np.sqrt(DIM)
            shares = np.exp(logits - logits.max())
            expected[row, head // 2, :REAL] += shares / shares.sum()
            # The query is rounded to 127ths of its largest component: half of one in each.
            off = np.abs(wide).max() / 254 * np.abs(keys[:, head // 2] @ basis).sum(axis=1).max()
            bound = max(bound, off / np.sqrt(DIM))
    by_chunk = expected.reshape(2, HEADS, -1, CHUNK).sum(axis=3)
    assert bound < 0.3
    np.testing.assert_allclose(np.asarray(found), by_chunk, rtol=np.expm1(2 * bound), atol=1e-6)
    assert np.abs(np.asarray(found) - by_chunk).max() < 0.02  # far below that bound


def test_many_queries_are_scored_as_few_are() -> None:
    rng = np.random.default_rng(2)
    turned = turn(int4_keys(rank=DIM)[0], dims=8)
    q = jnp.asarray(rng.standard_normal((5, 3, 8, DIM)), jnp.bfloat16)  # 60 rows of a KV head
    lengths = jnp.asarray([3, 1, 0, 2, 3], jnp.int32)
    run = jax.jit(partial(score, num_tokens=jnp.int32(REAL), chunk_tokens=CHUNK, target=CPU))
    together = np.asarray(run(q, turned, q_lengths=lengths))
    for row in range(5):
        alone = np.asarray(run(q[row : row + 1], turned, q_lengths=lengths[row : row + 1]))
        np.testing.assert_allclose(together[row], alone[0], rtol=1e-6, atol=1e-7)
    assert not together[2].any()
