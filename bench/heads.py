"""`ckv-heads`: `ckv`, scored by two heads of each period alone, those that find things."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ckv_jax.config import SystemConfig
from ckv_jax.data.reference import LEARNED, demo_ledger
from ckv_jax.head_profile import measured
from ckv_jax.model.decoder import Transformer
from ckv_jax.model.weights import load_pretrained
from ckv_jax.sample_texts import pieces_of
from ckv_jax.systems import SYSTEMS, preset

__all__ = ["HEADED", "headed", "headed_system"]

HEADED = "ckv-heads"
SEEDS = (900, 901)
"""Of the ledgers that heads of the reference checkpoint are profiled on; others are asked about."""
_LAYERS = 2  # of each period, with one head each: the default of `ckv heads profile`
_TOKENS = 4096


def headed(model: Transformer, texts: Sequence[np.ndarray]) -> SystemConfig:
    """That system for a model, profiled as `ckv heads profile` does, on texts int32 [n] like those
    that it is to read."""
    ours = SYSTEMS["ckv"]
    profile = measured(model, ours.period, pieces_of(texts, _TOKENS))
    return dataclasses.replace(preset("ckv", heads=profile.best(ours.period, _LAYERS)), name=HEADED)


def headed_system(folder: Path) -> SystemConfig:
    """That system for a checkpoint that has learnt to read ledgers."""
    pages = [demo_ledger(seed, _TOKENS // 2, asked=LEARNED) for seed in SEEDS]
    model = load_pretrained(folder, dtype="float32")
    return headed(model, [page.tokens for page in pages])
