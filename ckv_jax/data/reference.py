"""The packaged reference checkpoint, documents to ask it about, and small checkpoints with random
weights.

`python -m ckv_jax.data.reference` prints the document of `ckv demo`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from ckv_jax.data.handbook import handbook
from ckv_jax.data.ledger import QUESTION_FAMILIES, SPECIALS, Ledger, make_ledger
from ckv_jax.errors import CheckpointError
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.model.weights import random_model, save_pretrained

LEARNED = tuple(family for family in QUESTION_FAMILIES if family != "tracking")
"""The families that the checkpoint answers; it never learned to follow a name to a name."""
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reference_folder() -> Path:
    """The HF folder of the shipped checkpoint; raises `CheckpointError` if it is not installed."""
    folder = Path(__file__).parent / "reference"
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"the reference checkpoint is not installed: there is no {folder}")
    return folder


def demo_document(
    seed: int = 0, tokens: int = 2048, *, questions: int = 50
) -> tuple[str, list[tuple[str, str]]]:
    """A ledger as text, with (question, answer) pairs; an answer is one token of the model.

    The names and topics in it were never part of a training ledger. The document encodes to
    exactly `tokens` tokens. An answer compares with a decoded token stripped of its space.
    """
    tokenizer = _tokenizer()
    page = demo_ledger(seed, tokens, questions=questions)
    pairs = [
        (
            tokenizer.decode(page.questions[i, : page.lengths[i]]),
            tokenizer.decode([int(page.answers[i])]).strip(),
        )
        for i in range(len(page.answers))
    ]
    return tokenizer.decode(page.tokens), pairs


def demo_ledger(seed: int = 0, tokens: int = 4096, *, questions: int = 50) -> Ledger:
    """The same document and questions as token ids, with families."""
    rng = np.random.default_rng((seed, tokens, 7))
    return make_ledger(rng, tokens, questions=questions, asked=LEARNED)


@cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(reference_folder())


# -- random weights --------------------------------------------------------------------------------


def random_checkpoint(
    folder: Path,
    *,
    num_layers: int = 16,
    hidden_size: int = 256,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    head_dim: int = 64,
    vocab_size: int = 4096,
    dtype: str = "bfloat16",
) -> Path:
    """`folder`, holding a Qwen2.5-shaped checkpoint in HF format; what is there already is kept.

    The tokenizer is a byte-level BPE trained on the handbook. The folder appears by one rename,
    so that an interrupted first run leaves nothing that looks like a checkpoint.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        size = save_tokenizer(building, vocab_size)
        config = ModelConfig(
            vocab_size=size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            tie_word_embeddings=True,
            eos_token_ids=(0,),
        )
        save_pretrained(random_model(config, dtype=dtype), building)
        try:
            os.rename(building, folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was quicker
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def save_tokenizer(folder: Path, vocab_size: int) -> int:
    """Save a byte-level BPE of at most `vocab_size` tokens to `folder`; returns how many it has."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast  # slow to import

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(handbook().split("\n\n"), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIALS[0], pad_token=SPECIALS[0]
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(str(folder))
    return int(tokenizer.get_vocab_size())


if __name__ == "__main__":
    sys.stdout.write(demo_document()[0])
