"""Decode over a prefix that the device cannot hold: in what order its packs are read."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from engine_support import TIGHT, scale_error, small_engine, tokens
from engine_tiny import TINY, tiny_engine

from ckv_jax import Request, SamplingParams
from ckv_jax.decode.decoder import Streaming
from ckv_jax.decode.window import Window
from ckv_jax.prefix.prefetcher import Prefetcher, ReadJob
from ckv_jax.trace import Trace


@pytest.mark.parametrize(("slots", "ahead"), [(40, True), (20, False)])
def test_the_next_layer_is_read_while_one_computes_where_four_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int, ahead: bool
) -> None:
    begun: list[tuple[int, bool, bool]] = []
    submit = Prefetcher.submit

    def noted(prefetcher: Prefetcher, *jobs: ReadJob) -> None:
        begun.extend((job.group, job.demanded, job.early) for job in jobs)
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
    early = [ahead and group > 0 for group in range(layers)]
    assert later == [(group, not early[group], early[group]) for group in range(layers)] * 3


def test_a_text_whose_steps_do_not_fit_attends_to_what_it_has_said(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=4)
    with tiny_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as large:
        request = Request(prefix=large.ingest(tokens(100)), suffix=[3, 1], budget=1.0)
        (expected,) = large.generate(request, sampling, keep_kv=True).results()
        config = dataclasses.replace(
            large.config, prefetch_device_bytes=4 * large.layout.pack_bytes
        )
        with large.variant(config) as small:
            (text,) = small.generate(request, sampling, keep_kv=True).results()
    found, right = text.completion().kv, expected.completion().kv
    assert found is not None and right is not None
    assert scale_error(np.asarray(found), np.asarray(right)) < TIGHT


@pytest.mark.parametrize(
    ("room", "chooses", "expected"),
    [(4, False, [1, 2, 3, None]), (4, True, [1, None, 3, None]), (3, False, [None] * 4)],
)
def test_what_is_not_chosen_yet_or_does_not_fit_is_not_read_ahead(
    tmp_path: Path, room: int, chooses: bool, expected: list[int | None]
) -> None:
    """Two periods of two steps, each of two groups, of which two chunks are attended to."""
    with small_engine(
        tmp_path, system="ckv", model=dataclasses.replace(TINY, num_layers=8),
        overrides={"period": 4, "subperiod": 2, "pack_layers": 1},
    ) as large:  # fmt: skip
        prefix = large.ingest(tokens(40))
        slots = room * large.layout.pack_bytes
        config = dataclasses.replace(
            large.config, device_cache_bytes=0, prefetch_device_bytes=slots
        )
        with large.variant(config) as small:
            memory, plan = small.worker.memory, small.worker.plan
            assert memory.step_slots == room
            opened = small.worker.prefixes.known(prefix)
            window = Window(opened, memory, plan, held=False)
            for choice in range(plan.choices):
                window.choose(choice, np.arange(2))
            packs = partial(small.worker.packs, [], Trace())
            streaming = Streaming(small.layers, memory, plan, packs)
            for step, index in zip(plan.steps, expected, strict=True):
                then = [] if index is None else [plan.steps[index]]
                assert streaming._following(step, window, chooses) == then
