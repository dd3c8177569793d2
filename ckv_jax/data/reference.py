"""The reference checkpoint that ships with the package, and documents to ask it about.

`python -m ckv_jax.data.reference` prints the document of `ckv demo`.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np

from ckv_jax.data.ledger import FAMILIES, Ledger, make_ledger
from ckv_jax.errors import CheckpointError
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer

LEARNED = tuple(family for family in FAMILIES if family != "tracking")
"""The families that the checkpoint answers; it never learned to follow a name to a name."""


def reference_folder() -> Path:
    """The HF folder of the shipped checkpoint; raises `CheckpointError` if it is not installed."""
    folder = Path(__file__).parent / "reference"
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"the reference checkpoint is not installed: there is no {folder}")
    return folder


def demo_document(
    seed: int = 0,
    tokens: int = 2048,
    *,
    questions: int = 50,
) -> tuple[str, list[tuple[str, str]]]:
    """A ledger as text, with (question, answer) pairs; an answer is one token of the model.

    The names and topics in it were never part of a training ledger. The document encodes to
    exactly `tokens` tokens. An answer compares with a decoded token stripped of its space.
    """
    tokenizer = _tokenizer()
    page = demo_ledger(seed, tokens, questions=questions, asked=LEARNED)
    pairs = [
        (
            tokenizer.decode(page.questions[i, : page.lengths[i]]),
            tokenizer.decode([int(page.answers[i])]).strip(),
        )
        for i in range(len(page.answers))
    ]
    return tokenizer.decode(page.tokens), pairs


def demo_ledger(
    seed: int = 0,
    tokens: int = 4096,
    *,
    questions: int | None = 50,
    asked: tuple[str, ...] = FAMILIES,
) -> Ledger:
    """The same document and questions as token ids, with families and needle positions."""
    rng = np.random.default_rng((seed, tokens, 7))
    return make_ledger(rng, tokens, split="test", questions=questions, asked=asked)


@cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(reference_folder())


if __name__ == "__main__":
    sys.stdout.write(demo_document()[0])
