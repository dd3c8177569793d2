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
import numpy as np
from jax import Array

from ckv_jax.baselines.decoding import Guessed, Indexed, in_every_layer, indexed, lru
from ckv_jax.config import OwnParts
from ckv_jax.kernels_pallas.score.probe import Keys, Probe
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.config import ModelConfig
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.selection.base import float_keys
from ckv_jax.selection.select import Select

RANK = Fraction(128, 1024)
"""Rank of keys, as a share of the key values of a token (the authors' script of their Table 4)."""


class Predicted(Indexed[Keys], Guessed):
    """Keys of the index are scored in place of the digest."""

    def begin(self, batch: int) -> None:
        super().begin(batch)
        for calls, indices in zip(self._calls, self._indices, strict=True):
            for call, low in zip(calls, indices, strict=True):
                if call.of.key[-1] != "low rank":
                    probes = tuple((keys,) for keys in low)
                    call.of = call.of._replace(probes=probes, key=(*call.of.key, "low rank"))


def low_rank(
    config: ModelConfig, opened: OpenPrefix, layer: int, keys: np.ndarray, values: np.ndarray, *,
    share: Fraction, each_head: bool = False,
) -> Keys:  # fmt: skip
    """The layer's keys float32 [M, C, K, D] in their best subspace, of all heads together or of
    each, in the layout's dtype. It has that share of the dimensions.

    They are kept as wide as keys are: a product with them is one in the subspace.
    """
    chunks, size, *width = keys.shape
    rows = keys.reshape(chunks * size, width[0] if each_head else 1, -1).swapaxes(0, 1)  # [G, T, W]
    _, basis = np.linalg.eigh(rows.swapaxes(1, 2) @ rows)  # ascending
    basis = basis[:, :, -max(1, round(share * rows.shape[2])) :]
    low = np.zeros((opened.probe_chunks * size, *width), opened.prefix.layout.numpy_dtype)
    found = (rows @ basis) @ basis.swapaxes(1, 2)
    low[: chunks * size] = found.swapaxes(0, 1).reshape(-1, *width)
    return Keys(jnp.asarray(low))


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
