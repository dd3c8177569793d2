"""Decode over a prefix that the device cannot hold: in what order its packs are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_support import tokens
from engine_tiny import tiny_engine

from ckv_jax import Request, SamplingParams
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.streaming import Streaming
from ckv_jax.reads.prefetcher import Prefetcher
from ckv_jax.reads.read_job import ReadJob
from ckv_jax.systems import SYSTEMS


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


@pytest.mark.parametrize(
    ("room", "chooses", "expected"),
    [(4, False, [1, 2, 3, None]), (4, True, [1, None, 3, None]), (3, False, [None] * 4)],
)
def test_what_is_not_chosen_yet_or_does_not_fit_is_not_read_ahead(
    room: int, chooses: bool, expected: list[int | None]
) -> None:
    """Two periods of two steps, each of two groups, of which two chunks are attended to."""
    system = dataclasses.replace(SYSTEMS["ckv"], period=4, subperiod=2, pack_layers=1)
    plan = Plan.of(8, system)
    window: Any = SimpleNamespace(ids=lambda step: [0, 1])
    streaming: Any = object.__new__(Streaming)  # without the programs that it would run
    streaming._plan, streaming._memory = plan, SimpleNamespace(step_slots=room)
    streaming._layers = SimpleNamespace(peers=SimpleNamespace(least=lambda slots: slots))
    for step, index in zip(plan.steps, expected, strict=True):
        then = [] if index is None else [plan.steps[index]]
        assert streaming._following(step, window, chooses) == then
