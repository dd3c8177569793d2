"""KVSwap: groups of 4 tokens, predicted a layer before by low-rank keys (`kvswap`).

Zhang et al. 2025 (arXiv 2511.11907), and the authors' code where it says more.

- Index: the keys of a layer's heads together, RoPE applied, as a product of rank 128 for 1,024 key
  values a token, in memory. The basis is that of the prefix's own keys (`low_rank`), in the paper
  one a layer of calibration texts.
- Prediction: the hidden state that enters a layer makes the next layer's queries (`Guessed`). The
  mean over heads of query and low-rank key is a token's score, the largest score in a group the
  group's (`peak_of_group`). All heads of a layer share the groups. The first layer goes by its own.
- Grouped reads: keys and values of all heads of a group are one read.
- Reuse buffer: what the latest token selected stays on the device; what of it the next one does not
  select leaves. Rolling buffer: the question and the generation are attended to.
- Number of tokens: a share of the groups, by the budget; in the authors' scripts at most 400.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import jax.numpy as jnp
from jax import Array

from ckv_jax.baselines.decoding import Predicted, in_every_layer, indexed, low_rank, lru
from ckv_jax.config import OwnParts
from ckv_jax.kernels_pallas.score.probe import Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.selection.base import float_keys
from ckv_jax.selection.select import Select

RANK = Fraction(128, 1024)
"""Rank of keys, as a share of the key values of a token (the authors' script of their Table 4)."""


def peak_of_group(
    q: Array, probe: Probe, *, num_tokens: Array, q_lengths: Array, chunk_tokens: int,
    target: Target,
) -> Array:  # fmt: skip
    """The largest product of a key of the chunk with its query, mean over heads: see `ChunkScore`.
    Of several queries the largest counts."""
    keys = float_keys(probe, q.dtype)  # [T, K, D]
    rows, queries, _, dim = q.shape
    mean = jnp.mean(
        q.astype(jnp.float32).reshape(rows, queries, keys.shape[1], -1, dim), axis=3
    )  # [B, S, K, D]
    products = jnp.einsum("bskd,tkd->bst", mean, keys) / keys.shape[1]
    real = jnp.arange(queries, dtype=jnp.int32)[None, :] < q_lengths[:, None]
    best = jnp.max(jnp.where(real[:, :, None], products, -jnp.inf), axis=1)
    stored = jnp.arange(len(keys), dtype=jnp.int32)[None, :] < num_tokens
    scores = jnp.where(stored, best, -jnp.inf).reshape(rows, -1, chunk_tokens)
    return jnp.max(scores, axis=2)


KVSWAP = in_every_layer(
    "kvswap",
    chunk_tokens=4,
    digest="int4",
    decode=Select(score=peak_of_group),
    own=OwnParts(decoding=indexed(Predicted, keep=lru, make=partial(low_rank, share=RANK))),
)
