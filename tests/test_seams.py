"""What one adds to the engine is one object, and touches no other file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from engine_support import tokens
from engine_tiny import tiny_engine

from ckv_jax import Request
from ckv_jax.cache.policy import Policy
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.kernels_pallas.target import Target


def the_last_chunks(
    q: jnp.ndarray, probe: Probe, *, num_tokens: jnp.ndarray, q_lengths: jnp.ndarray,
    chunk_tokens: int, target: Target,
) -> jnp.ndarray:  # fmt: skip
    """A selector: later chunks are worth more."""
    chunks = jnp.arange(probe.shape[0] // chunk_tokens, dtype=jnp.float32)
    return jnp.broadcast_to(chunks[None, :], (q.shape[0], len(chunks)))


def first_come(importance: np.ndarray, frequency: np.ndarray, last_used: np.ndarray) -> np.ndarray:
    """A cache policy: what was used earliest stays."""
    return np.where(last_used > 0, 1.0 / np.maximum(last_used, 1), 0.0)


def test_a_selector_and_a_policy_of_ones_own(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as plain:
        pack = plain.layout.pack_bytes
        prefix, other = plain.ingest(tokens(160)), plain.ingest(tokens(160, 1))
        system = dataclasses.replace(
            plain.system, score=the_last_chunks, policy=Policy(first_come), prefetch="intra"
        )
        config = dataclasses.replace(
            plain.config, system=system, device_cache_bytes=8 * pack, host_cache_bytes=0
        )
        with plain.variant(config) as engine:
            for text in (prefix, other, prefix):
                request = Request(prefix=text, suffix=[1, 2], budget=0.2)
                (result,) = engine.reprefill([request])
                for chosen in engine.last_selection(text):
                    assert chosen.tolist() == [8, 9]
            assert result.trace.bytes["ssd"] == 0  # two chunks of four layers: the first to come
            assert result.trace.bytes["device"] == 8 * pack
