"""What a cold engine of small pools answers, a warm one answers as well."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from engine_support import small_engine, tokens
from engine_tiny import TINY

from ckv_jax import Request, Result
from ckv_jax.config import EngineConfig


@pytest.mark.parametrize("system", ["as-lru", "as-h2o-lru", "impress"])
def test_packs_that_are_cached_never_take_the_room_of_the_layer_that_computes(
    tmp_path: Path, system: str
) -> None:
    """AttentionStore asks for layers ahead: what is cached of those is kept for them."""
    model = dataclasses.replace(TINY, num_layers=3)
    with small_engine(tmp_path, system=system, model=model) as large:
        prefix = large.ingest(tokens(512))
        pack = large.layout.pack_bytes  # keys or values of a chunk: a layer has 16, the pool 28
        small: EngineConfig = dataclasses.replace(
            large.config,
            device_cache_bytes=14 * pack,
            prefetch_device_bytes=14 * pack,
            host_cache_bytes=33 * pack,
        )

        def request(turn: int) -> Request:
            return Request(prefix=prefix, suffix=tokens(16, seed=turn).tolist(), budget=0.25)

        def answered(result: Result) -> np.ndarray:
            result.raise_for_error()
            assert result.logits is not None
            return result.logits

        with large.variant(small) as warm:
            for turn in range(4):
                [expected] = large.reprefill([request(turn)])
                [got] = warm.reprefill([request(turn)])
                np.testing.assert_array_equal(answered(got), answered(expected))
            assert got.trace.bytes["device"] + got.trace.bytes["host"], "it is warm"
