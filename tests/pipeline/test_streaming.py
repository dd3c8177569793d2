"""Decode over a prefix that the device cannot hold: in what order its packs are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine_support import tokens
from engine_tiny import tiny_engine

from ckv_jax import Request, SamplingParams
from ckv_jax.reads.prefetcher import Prefetcher
from ckv_jax.reads.read_job import ReadJob


@pytest.mark.parametrize(("slots", "ahead"), [(40, True), (20, False)])
def test_the_next_layer_is_read_while_one_computes_where_four_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, ahead: bool
) -> None:
    begun: list[tuple[int, bool]] = []
    submit = Prefetcher.submit

    def noted(prefetcher: Prefetcher, *jobs: ReadJob) -> None:
        begun.extend((job.group, job.demanded) for job in jobs)
        submit(prefetcher, *jobs)

    sampling = SamplingParams(max_tokens=4)
    with tiny_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as large:
        request = Request(prefix=large.ingest(tokens(100)), suffix=[3, 1], budget=1.0)
        (expected,) = large.generate(request, sampling).results()
        layers, pack = large.layout.groups, large.layout.pack_bytes
        config = dataclasses.replace(large.config, prefetch_device_bytes=slots * pack)
        with large.variant(config) as small:
            small.generate(request, SamplingParams(max_tokens=1)).results()
            monkeypatch.setattr(Prefetcher, "submit", noted)
            (text,) = small.generate(request, sampling).results()
    assert text.token_ids.tolist() == expected.token_ids.tolist()
    later = begun[-3 * layers :]  # tokens after the first, a read for each layer
    assert later == [(group, not ahead or group == 0) for group in range(layers)] * 3
