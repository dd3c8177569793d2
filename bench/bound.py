"""A model written by hand whose answers take two texts: a name in one, its value in another.

The shipped checkpoint knows a fact by the words beside each other, so texts need each other only
where they meet. Here `let irene oslo` may stand anywhere before `trace kurt irene`, and the
question `trace kurt` asks for oslo. Four layers of one head each: (0) a token takes the code of the
one before it; (1) a token whose own code was the one before some earlier token's takes that token's
code as its value; (2) the question's last word finds the token that it stands before and takes that
one's value; (3) nothing. So the value comes to the alias's sentence in layer 1, from whatever text
it is in: KV that was computed without that text does not have it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Attention, Transformer
from ckv_jax.model.weights import random_model

_CODE = 56  # dimensions of a token's code, all of which turn hardly
_DIM = 128  # of the one head; its fastest pairs tell positions, its slowest hold a code
_FAST = 13
LET, TRACE, DOT = 1, 2, 3
NAMES, VALUES, FILLERS = range(4, 204), range(204, 304), range(304, 512)
"""Its words."""

CONFIG = ModelConfig(
    vocab_size=512, hidden_size=5 * _CODE, intermediate_size=32, num_layers=4, num_heads=1,
    num_kv_heads=1, head_dim=_DIM, rope_theta=1e10, max_position_embeddings=16384,
    tie_word_embeddings=False,
)  # fmt: skip
_OWN, _BEFORE, _VALUE, _ANSWER, _ONES = (slice(i * _CODE, (i + 1) * _CODE) for i in range(5))


def bound_model(seed: int = 0) -> Transformer:
    """The model, in float32."""
    model = random_model(CONFIG, dtype="float32", seed=seed)
    rng = np.random.default_rng(seed)
    codes = rng.choice([-1.0, 1.0], (CONFIG.vocab_size, _CODE)).astype(np.float32)
    table = np.zeros((CONFIG.vocab_size, CONFIG.hidden_size), np.float32)
    table[:, _OWN] = codes
    table[:, _ONES] = 4.0  # keeps every state's norm about the same
    model.embedding[...] = jnp.asarray(table)
    head = np.zeros_like(table)
    head[:, _ANSWER] = codes
    model.head[...] = jnp.asarray(head)
    wiring = [
        (None, None, _OWN, _BEFORE), (_OWN, _BEFORE, _OWN, _VALUE), (_OWN, _BEFORE, _VALUE, _ANSWER)
    ]  # fmt: skip
    for number, layer in enumerate(model.layers):
        for kernel in (layer.mlp.gate_up_kernel, layer.mlp.down_kernel):
            kernel[...] = jnp.zeros_like(kernel[...])
        wired = wiring[number] if number < len(wiring) else (None, None, None, None)
        _write(layer.attention, *wired)
    return model


def _write(
    attention: Attention, asks: slice | None, by: slice | None, takes: slice | None,
    gives: slice | None,
) -> None:  # fmt: skip
    """One head: queries of what a token `asks`, keys of what it is found `by`."""
    size = CONFIG.hidden_size
    norm = np.sqrt((16 + 1.5) / 5)  # of a state's root mean square
    query, key, value = (np.zeros((size, _DIM), np.float32) for _ in range(3))
    output = np.zeros((_DIM, size), np.float32)
    query_bias, key_bias = np.zeros((2, _DIM), np.float32)
    half = _DIM // 2
    slow = np.concatenate([np.arange(half - _CODE // 2, half), np.arange(_DIM - _CODE // 2, _DIM)])
    gain = np.sqrt(np.sqrt(_DIM))  # each, so that a logit is the product of codes
    if asks is not None and by is not None:
        query[asks, slow] = np.eye(_CODE) * norm * gain
        key[by, slow] = np.eye(_CODE) * norm * gain
    elif takes is not None:  # the token before: pairs that agree one step back
        turn = CONFIG.rope_theta ** (-np.arange(_FAST) / half)
        key_bias[:_FAST] = 5 * gain
        query_bias[:_FAST], query_bias[half : half + _FAST] = (
            5 * gain * np.cos(-turn), 5 * gain * np.sin(-turn)
        )  # fmt: skip
    if takes is not None and gives is not None:
        value[takes, slow] = np.eye(_CODE) * norm
        output[slow, gives] = np.eye(_CODE)

    def put(kernel: Any, values: np.ndarray) -> None:
        out_first = attention.out_first
        kernel[...] = jnp.asarray(values.T if out_first else values)

    put(attention.query_kernel, query)
    put(attention.kv_kernel, np.concatenate([key, value], axis=1))
    put(attention.output_kernel, output)
    attention.query_bias[...] = jnp.asarray(query_bias)
    attention.kv_bias[...] = jnp.asarray(np.concatenate([key_bias, 0 * key_bias]))
