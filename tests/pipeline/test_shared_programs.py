"""Engines over one model share what is compiled for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from compilations import compilations
from engine_support import small_engine, tokens
from engine_tiny import TINY

from ckv_jax import Request, SamplingParams

MODEL = dataclasses.replace(TINY, num_layers=2, num_heads=4, num_kv_heads=4)


@pytest.mark.parametrize(("system", "slots"), [("ckv", 3), ("impress", 64)])
def test_a_variant_compiles_nothing_again(tmp_path: Path, system: str, slots: int) -> None:
    """Steps in parts, which three slots are too few for, and layer by layer."""
    with small_engine(tmp_path, system=system, model=MODEL, device_cache_bytes=0) as large:
        prefix = large.ingest(tokens(140))
        requests = [Request(prefix=prefix, suffix=tokens(5, i), budget=0.5) for i in range(2)]
        config = dataclasses.replace(
            large.config, prefetch_device_bytes=slots * large.layout.pack_bytes
        )
        counted = []
        for _ in range(2):
            before = compilations()
            with large.variant(config) as engine:
                for request in requests:
                    engine.reprefill([request])[0].raise_for_error()
                if engine.system.chunked:
                    engine.generate(requests[0], SamplingParams(max_tokens=3)).results()
            counted.append(compilations() - before)
    assert counted[0] > 0 and counted[1] == 0
