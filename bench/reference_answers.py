"""The reference checkpoint's answers with everything attended to, by two implementations."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.accuracy import ask
from ckv_jax.config import EngineConfig
from ckv_jax.data.ledger import FAMILIES, Ledger
from ckv_jax.engine import Engine

__all__ = ["by_engine", "by_transformers", "counts"]


def by_engine(folder: Path, pages: Sequence[Ledger]) -> list[np.ndarray]:
    """bool [Q] a ledger: right answers of the engine at budget 1, in bfloat16."""
    config = EngineConfig(system="as-lru", prefill_block=4096)  # nobody waits: few, large blocks
    with (
        tempfile.TemporaryDirectory() as store,
        Engine.from_pretrained(folder, store=store, config=config) as engine,
    ):
        return [ask(engine, page, 1.0)[0] for page in pages]


def by_transformers(folder: Path, pages: Sequence[Ledger]) -> list[np.ndarray]:
    """The same by `transformers` on PyTorch, in bfloat16: the ledger once, then its questions side
    by side, each of which sees the ledger and itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = []
    with torch.no_grad():
        for page in pages:
            read = model(torch.from_numpy(page.tokens.astype(np.int64))[None], logits_to_keep=1)
            asked = np.arange(page.questions.shape[1]) < page.lengths[:, None]
            owner, place = np.nonzero(asked)
            own = (owner[:, None] == owner) & (place[:, None] >= place)
            seen = np.concatenate([np.ones((len(own), len(page.tokens)), bool), own], axis=1)
            said = model(
                torch.from_numpy(page.questions[asked].astype(np.int64))[None],
                torch.from_numpy(seen)[None, None],
                torch.from_numpy(len(page.tokens) + place)[None],
                read.past_key_values,
            ).logits[0].argmax(-1).numpy()  # fmt: skip
            found.append(said[np.cumsum(page.lengths) - 1] == page.answers)
    return found


def counts(pages: Sequence[Ledger], right: Sequence[np.ndarray]) -> dict[str, tuple[int, int]]:
    """(right, asked) of every family that was asked."""
    kinds, good = np.concatenate([page.families for page in pages]), np.concatenate(right)
    return {
        family: (int(good[kinds == index].sum()), int((kinds == index).sum()))
        for index, family in enumerate(FAMILIES)
        if (kinds == index).any()
    }
