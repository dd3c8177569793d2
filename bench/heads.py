"""`ckv`, scored by two heads of each period alone or by one: those that find things."""

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

HEADED = {"ckv-heads": 2, "ckv-one-head": 1}
"""Layers of each period that score, one head of each; `ckv heads profile` takes two by itself."""
SEEDS = (900, 901)
"""Of the ledgers that heads of the reference checkpoint are profiled on; others are asked about."""
_TOKENS = 4096


def headed(name: str, model: Transformer, texts: Sequence[np.ndarray]) -> SystemConfig:
    """One of them for a model, profiled as `ckv heads profile` does, on texts int32 [n] like those
    that it is to read."""
    ours = SYSTEMS["ckv"]
    profile = measured(model, ours.period, pieces_of(texts, _TOKENS))
    heads = profile.best(ours.period, HEADED[name])
    return dataclasses.replace(preset("ckv", heads=heads), name=name)


def headed_system(name: str, folder: Path) -> SystemConfig:
    """One of them for a checkpoint that has learnt to read ledgers."""
    pages = [demo_ledger(seed, _TOKENS // 2, asked=LEARNED) for seed in SEEDS]
    model = load_pretrained(folder, dtype="float32")
    return headed(name, model, [page.tokens for page in pages])
