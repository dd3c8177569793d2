"""A Llama checkpoint with a SentencePiece tokenizer that says one sentence by heart."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

SENTENCE = "The capital of France is the quick brown fox"
WORDS = ["▁" + word for word in dict.fromkeys(SENTENCE.split())]


def spm_tokenizer() -> PreTrainedTokenizerFast:
    """In the manner of Llama 2: ▁ for spaces, byte fallback, one space taken off in front."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocabulary |= {f"<0x{i:02X}>": 3 + i for i in range(256)}
    merges = []
    for word in WORDS:
        for end in range(1, len(word) + 1):
            for piece in (word[end - 1], word[:end]):
                vocabulary.setdefault(piece, len(vocabulary))
        pairs = [(word[:end], word[end]) for end in range(1, len(word))]
        merges += [pair for pair in pairs if pair not in merges]
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def write_spm_checkpoint(folder: Path) -> None:
    """A model of two layers that add nothing: a token's embedding asks for the next word's."""
    import dataclasses

    import jax.numpy as jnp

    from ckv_jax.model.weights import random_model, save_pretrained
    from tests.model.small import CONFIG

    tokenizer = spm_tokenizer()
    tokenizer.save_pretrained(str(folder))
    size = len(tokenizer)
    config = dataclasses.replace(
        CONFIG, model_type="llama", vocab_size=size, num_layers=2, eos_token_ids=(2,)
    )
    model = random_model(config, dtype="float32")
    for layer in model.layers:
        for kernel in (layer.attention.output_kernel, layer.mlp.down_kernel):
            kernel[...] = jnp.zeros_like(kernel[...])
    table = np.random.default_rng(0).normal(size=(size, config.hidden_size)).astype(np.float32)
    head = np.zeros_like(table)
    ids = tokenizer(SENTENCE)["input_ids"]
    for now, following in itertools.pairwise(ids):
        head[following] += 2 * table[now] / np.sqrt(np.mean(table[now] ** 2))
    model.embedding[...], model.head[...] = jnp.asarray(table), jnp.asarray(head)
    save_pretrained(model, folder)
