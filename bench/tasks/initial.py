"""A structured start: some heads look at near tokens, others match; training does the rest.

From plain random weights a small transformer spends most of its training on a plateau until
copying heads form. Here the first layers get heads whose query and key *biases* peak one and two
tokens back under RoPE, and later layers get heads whose queries read the current word from the
subspace in which those heads wrote the earlier one (compare mimetic initialisation,
arXiv 2305.09828). Nothing of the tasks or of the vocabulary is built in.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from bench.tasks.dense import Params, split
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.rope import inverse_frequencies
from ckv_jax.model.weights import random_model

__all__ = ["initial"]

_NEAR_LAYERS = 4  # layers whose heads 0 and 1 look one and two tokens back
_NEAR_PEAK = 12.0  # attention score of the token a near head looks at
_WRITE = 0.5  # gain of what a near head writes
_MATCH = 3.5  # gain of a matching head's queries and keys
_COPY = 0.7  # gain of what a matching head copies


def initial(config: ModelConfig, seed: int) -> Params:
    """Float32 parameters, layers stacked: embeddings of standard deviation 0.5, unit-gain inputs,
    small output projections, near heads in the first layers and matching heads after them."""
    params = split(random_model(config, dtype="float32", seed=seed))
    layers, rest = params["layers"], params["rest"]
    unit = config.hidden_size**-0.5 / 0.02
    heads = {n: np.array(leaf) for n, leaf in layers["attention"].items()}
    heads["query_kernel"] *= unit
    heads["kv_kernel"] *= unit
    rng = np.random.default_rng((seed, 2))
    written = [_near(heads, layer, config, rng) for layer in range(_NEAR_LAYERS)]
    for layer in range(_NEAR_LAYERS, config.num_layers):
        for head in range(config.num_kv_heads // 2):
            _match(heads, layer, head, written[(layer + head) % _NEAR_LAYERS], config, rng)
    layers["attention"] = {n: jnp.asarray(leaf) for n, leaf in heads.items()}
    layers["mlp"]["gate_up_kernel"] = layers["mlp"]["gate_up_kernel"] * unit
    rest["embedding"] = rest["embedding"] * 25
    rest["final_norm"]["weight"] = rest["final_norm"]["weight"] * 0.25
    return params


def _near(
    heads: dict[str, np.ndarray], layer: int, config: ModelConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Heads 0 and 1 look 1 and 2 tokens back; what head 0 reads and where it writes it."""
    dim, half = config.head_dim, config.head_dim // 2
    angles, _ = inverse_frequencies(config)
    fast = (angles > 0.02).astype(np.float32)
    size = np.sqrt(_NEAR_PEAK * np.sqrt(dim) / fast.sum())
    for head, back in ((0, 1), (1, 2)):
        q, k, v, out = _columns(config, head)
        heads["query_kernel"][layer][:, q] *= 0.1
        heads["kv_kernel"][layer][:, k] *= 0.1
        heads["query_bias"][layer][q] = np.r_[fast * size, np.zeros(half)]
        # the key at position j - back must line up with the query at j: turn it `back` forward
        turned = np.r_[np.cos(angles * back), np.sin(angles * back)]
        heads["kv_bias"][layer][k] = turned * np.r_[fast, fast] * size
        read, write = _frame(config, rng), _frame(config, rng)
        heads["kv_kernel"][layer][:, v] = read
        heads["output_kernel"][layer][out] = write.T * _WRITE
        if head == 0:
            first = read, write
    return first


def _match(
    heads: dict[str, np.ndarray],
    layer: int,
    head: int,
    written: tuple[np.ndarray, np.ndarray],
    config: ModelConfig,
    rng: np.random.Generator,
) -> None:
    """A head that finds where the current word was the previous one, and copies what is there."""
    q, k, v, out = _columns(config, head)
    angles, _ = inverse_frequencies(config)
    slow = (angles < 2e-3).astype(np.float32) + 0.25
    gain = np.r_[slow, slow] * _MATCH
    read, write = written
    order = rng.permutation(config.head_dim)  # which of the subspace's axes turn slowly
    heads["query_kernel"][layer][:, q] = read[:, order] * gain
    heads["kv_kernel"][layer][:, k] = write[:, order] * gain
    copied = _frame(config, rng)
    heads["kv_kernel"][layer][:, v] = copied
    heads["output_kernel"][layer][out] = copied.T * _COPY


def _columns(config: ModelConfig, head: int) -> tuple[slice, slice, slice, slice]:
    """Where a KV head and its first query head lie: query, key, value columns, output rows."""
    dim = config.head_dim
    query = head * (config.num_heads // config.num_kv_heads)
    value = config.num_kv_heads + head
    q, k, v = (slice(i * dim, (i + 1) * dim) for i in (query, head, value))
    return q, k, v, q


def _frame(config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    """Random orthonormal columns [E, D]."""
    return np.linalg.qr(rng.normal(size=(config.hidden_size, config.head_dim)))[0].astype("f4")
