"""The reference tokenizer: one token a known word, bytes for everything else."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram

from ckv_jax.data import words

__all__ = ["build", "save"]

_CHAT = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)


def build() -> Tokenizer:
    """A Unigram tokenizer whose ids are the order of `words.vocabulary()`.

    A whole known word scores best, then punctuation, digits and letters, then raw bytes, so any
    text encodes and decodes to itself (but for runs of spaces at its start).
    """
    pieces = []
    for token in words.vocabulary():
        known = token.startswith("▁") and len(token) > 1
        pieces.append((token, -1.0 if known else -8.0))
    tokenizer = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in words.SPECIALS]
    tokenizer.add_special_tokens(special)
    return tokenizer


def save(folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "eos_token": words.SPECIALS[0],
        "pad_token": words.SPECIALS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
