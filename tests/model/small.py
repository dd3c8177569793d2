"""A model small enough for every test, and a tokenizer small enough to read."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Transformer, einsum
from ckv_jax.model.weights import random_model

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    eos_token_ids=(1, 2),
)


@functools.cache
def small_model(dtype: str = "bfloat16", seed: int = 0) -> Transformer:
    """The model with random weights, made once for all that change nothing in it."""
    return random_model(CONFIG, dtype=dtype, seed=seed)


def dense(model: Transformer, tokens: Array) -> Array:
    """Float32 logits of every position of a causal pass over int32 [B, S]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden = model.embed(tokens)
    for layer in model.layers:
        hidden = layer(hidden, positions, causal_attention)
    return model.logits(hidden)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Attention of a sequence [B, S, H, D] to its own past, softmax in float32."""
    batch, length, _, dim = q.shape
    of_heads = q.reshape(batch, length, k.shape[2], -1, dim)
    scores = einsum("bskgd,btkd->bkgst", of_heads, k) * dim**-0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return einsum("bkgst,btkd->bskgd", weights, v).reshape(q.shape).astype(q.dtype)


CHAT = (
    "{% for m in messages %}{% if m.role == 'boss' %}{{ raise_exception('no boss') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)


LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<eot>"
    "{% endfor %}{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
"""In the manner of Llama 3: it writes the begin-of-text itself."""


def write_tokenizer(folder: Path, *, begin: str | None = None) -> None:
    """A byte-level BPE tokenizer like Qwen's, trained on a few words, in HF format.

    With `begin` it is one like Llama 3's: this token goes before every text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", *([begin] if begin else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat", "the dog sat"] * 4, trainer)
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin} $B",
            special_tokens=[(begin, backend.token_to_id(begin))],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", bos_token=begin
    )
    fast.chat_template = LLAMA_CHAT if begin else CHAT
    fast.save_pretrained(str(folder))
