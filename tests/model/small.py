"""A model small enough for every test, and a tokenizer small enough to read."""

from __future__ import annotations

from pathlib import Path

from ckv_jax.model.config import ModelConfig

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

CHAT = (
    "{% for m in messages %}{% if m.role == 'boss' %}{{ raise_exception('no boss') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)


def write_tokenizer(folder: Path, *, chat: bool = True) -> None:
    """A byte-level BPE tokenizer like Qwen's, trained on a few words, in HF format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat", "the dog sat"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    if chat:
        fast.chat_template = CHAT
    fast.save_pretrained(str(folder))
