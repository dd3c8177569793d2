"""Decode over a prefix that the device cannot hold: packs are read for every token."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine_support import TIGHT, kept_kv, scale_error, tokens
from engine_tiny import tiny_engine

from ckv_jax import Request


@pytest.mark.parametrize("slots", [40, 20, 4])
def test_a_generation_over_few_slots_is_that_over_many(tmp_path: Path, slots: int) -> None:
    """The next layer is read ahead where four fit; two of a step fit; a step does not fit."""
    with tiny_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as large:
        request = Request(prefix=large.ingest(tokens(100)), suffix=[3, 1], budget=1.0)
        (expected,) = kept_kv(large, [request], max_tokens=4)
        config = dataclasses.replace(
            large.config, prefetch_device_bytes=slots * large.layout.pack_bytes
        )
        with large.variant(config) as small:
            (found,) = kept_kv(small, [request], max_tokens=4)
    assert scale_error(found, expected) < TIGHT
