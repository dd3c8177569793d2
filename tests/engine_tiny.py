"""The smallest engine that has periods, subperiods and packs: it compiles in a second or two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from engine_support import SMALL, small_engine

from ckv_jax import Engine

TINY = dataclasses.replace(
    SMALL, hidden_size=32, intermediate_size=32, num_layers=4, num_heads=2, num_kv_heads=1
)


def tiny_engine(
    folder: Path,
    *,
    system: str = "ckv",
    seed: int = 0,
    nothing_compiled: bool = False,
    **config: object,
) -> Engine:
    """Four layers: two periods of two layers, one layer a call and a pack."""
    return small_engine(
        folder,
        system=system,
        model=TINY,
        seed=seed,
        overrides={"period": 2, "subperiod": 1, "pack_layers": 1},
        nothing_compiled=nothing_compiled,
        **config,
    )
