"""KVDrive's pipeline: what overlaps, what is tuned, what host memory is filled with, and that no
answer depends on any of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_sharp import POOL_BYTES, Sharp
from engine_support import SMALL, kept_kv, small_engine, tokens

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines.kvdrive import (
    MICRO_BATCHES,
    KvDriveSelections,
    Pipelined,
    best_packs,
    tune,
)
from ckv_jax.baselines.window_widths import Recorded, in_engine, selections_of
from ckv_jax.prefix.packs import Packs
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS
from ckv_jax.trace import Trace, perfetto

BUDGET = 0.2
LENGTH = 24

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store"), system=SYSTEMS["kvdrive"]) as made:
        yield made


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(250 - 16 * i, i)) for i in range(4)]


def asked(prefixes: list[Prefix]) -> list[Request]:
    return [
        Request(prefix=one, suffix=tokens(7, 40 + i).tolist(), budget=BUDGET)
        for i, one in enumerate(prefixes)
    ]


def cold(engine: Engine, **config: Any) -> Engine:
    """The same over the same store, with nothing cached on the device."""
    values = {"device_cache_bytes": 0, "prefetch_device_bytes": POOL_BYTES} | config
    return engine.variant(dataclasses.replace(engine.config, **values))


def drive_of(engine: Engine) -> KvDriveSelections:
    return selections_of(engine, KvDriveSelections)


def test_micro_batches_change_no_bit(engine: Engine, prefixes: list[Prefix]) -> None:
    with cold(engine) as other:
        found = []
        for count in (1, 2, 3, 8):
            in_engine(other, drive_of(other), micro_batches=count)
            found.append(kept_kv(other, asked(prefixes), max_tokens=LENGTH))
    for some in found[1:]:
        for mine, theirs in zip(found[0], some, strict=True):
            assert (mine == theirs).all()


def test_packs_of_one_micro_batch_are_fetched_while_the_next_selects(
    engine: Engine, prefixes: list[Prefix], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every selection is dispatched before the first look-up, and the reads of a micro-batch are
    asked for before the next one's selection is awaited (§6.1)."""
    done: list[str] = []
    score, demand, asks = Pipelined.score, Pipelined._demand, Packs.demand
    collect = Pipelined._collect

    def scored(self: Any, period: int, *args: Any) -> None:
        for call in self._calls[period]:
            call.found = None  # of the token before
        score(self, period, *args)
        done.extend(["period"] + ["select"] * sum(c.found is not None for c in self._calls[period]))

    def demanded(self: Any, call: Any) -> None:
        done.append("look up")
        demand(self, call)

    def collected(self: Any, period: int) -> None:
        done.append("wait")
        collect(self, period)

    def reads(self: Any, *args: Any) -> int:
        if done and done[-1] == "look up":
            done.append("fetch")
        return asks(self, *args)

    monkeypatch.setattr(Pipelined, "score", scored)
    monkeypatch.setattr(Pipelined, "_demand", demanded)
    monkeypatch.setattr(Pipelined, "_collect", collected)
    monkeypatch.setattr(Packs, "demand", reads)
    with cold(engine, host_cache_bytes=0) as other:
        in_engine(other, drive_of(other), micro_batches=2)
        kept_kv(other, asked(prefixes), max_tokens=8)
    layers = [layer.strip() for layer in " ".join(done).split("period")[1:]]
    assert len(layers) == 8 * engine.worker.plan.periods
    assert "select select look up fetch look up fetch wait" in layers
    for layer in layers:
        assert layer.replace(" fetch", "") == "select select look up look up wait"


def test_what_host_memory_has_is_copied_before_the_next_look_up(
    engine: Engine, prefixes: list[Prefix]
) -> None:
    """All is in host memory: nothing is left to wait for once all have selected."""
    timeline: list[Trace] = []
    with cold(engine, host_cache_bytes=64 << 20) as other:
        for _ in range(2):
            kept_kv(other, asked(prefixes), max_tokens=2)
            other.settle()
        in_engine(other, drive_of(other), timeline=timeline, micro_batches=2)
        texts = other.generate(asked(prefixes), SamplingParams(max_tokens=LENGTH)).results()
    told = [token for text in texts for token in text.trace.tokens]
    assert sum(token.host_hits for token in told) > 0
    assert sum(token.ssd_reads for token in told) == 0
    spans = [span for trace in timeline for span in trace.spans]
    copies = [span for span in spans if span.name == "copy"]
    for stage in (span for span in spans if span.name == "stage"):
        assert any(c.start_ns <= stage.start_ns and stage.end_ns <= c.end_ns for c in copies)
    assert {"select", "look up", "copy", "wait", "layer", "stage"} <= {span.name for span in spans}
    lanes = {event["args"]["name"] for event in perfetto(timeline)["traceEvents"]
             if event["name"] == "thread_name"}  # fmt: skip
    assert {"select", "look-up", "host memory", "compute", "fetch"} <= lanes


def test_host_memory_is_filled_by_importance(engine: Engine, prefixes: list[Prefix]) -> None:
    """Of what no window holds, the best of every layer and head by the question's last tokens."""
    layout, chunks = engine.layout, prefixes[0].num_chunks
    slots = 20
    with cold(engine, host_cache_bytes=slots * layout.pack_bytes) as other:
        request = asked(prefixes[:1])
        opened = other.worker.prefixes.use(prefixes[0])
        try:
            kept_kv(other, request, max_tokens=1)
            other.settle()
            tiers = other.worker.memory.tiers
            pages = opened.pages(np.arange(layout.groups)[:, None], np.arange(chunks)).reshape(-1)
            _, host = tiers.lookup(pages)
            importance, used = tiers.history(pages)
            assert (host >= 0).sum() == slots
            left = (used == 0) & (host < 0)
            assert importance[host >= 0].min() >= importance[left].max()
        finally:
            opened.close()


@pytest.mark.parametrize("stalls", [[0, 0, 0], [3, 1, 0]])
def test_layers_that_stalled_have_more_of_host_memory(stalls: list[int]) -> None:
    importance = np.array([[1, 2, 3, 4], [9, 8, 7, 6], [20, 0, 0, 0]], float)
    selection, chunk = best_packs(importance, 4, np.array(stalls))
    found = [*zip(selection.tolist(), chunk.tolist(), strict=True)]
    if any(stalls):
        assert sorted(found) == [(0, 1), (0, 2), (0, 3), (1, 0)]
    else:
        assert found == [(2, 0), (1, 0), (1, 1), (1, 2)]


def test_tuning_changes_no_answer(engine: Engine, prefixes: list[Prefix]) -> None:
    with cold(engine, host_cache_bytes=0) as other:
        requests = asked(prefixes[:2])
        plain = kept_kv(other, requests, max_tokens=LENGTH)
        found = tune(other, requests, SamplingParams(max_tokens=20))
        drive = drive_of(other)
        assert found.micro_batches == drive.micro_batches in MICRO_BATCHES[:2]
        assert found.ahead == drive.ahead
        assert [count for count, _ in found.seconds] == [1, 2]
        assert found.window == drive.times == found.windows[-1][0]
        assert drive.stalls.sum() > 0 and not drive.counting
        for mine, theirs in zip(plain, kept_kv(other, requests, max_tokens=LENGTH), strict=True):
            assert (mine == theirs).all()


def test_reads_ahead_are_tried_again(
    engine: Engine, prefixes: list[Prefix], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a calibration after one that found it faster without."""
    tried, finish = set[bool](), Pipelined.finish

    def finished(self: Pipelined) -> None:
        tried.add(self._drive.ahead)
        finish(self)

    with cold(engine, host_cache_bytes=0) as other:
        in_engine(other, drive_of(other), ahead=False)
        monkeypatch.setattr(Pipelined, "finish", finished)
        sampling = SamplingParams(max_tokens=2)
        tune(other, asked(prefixes[:1]), sampling, window=1.0)  # no width to profile
    assert tried == {True, False}


@pytest.mark.parametrize("near", [1.0, 1.25])
def test_near_misses_are_read_for_the_next_token(
    engine: Engine, prefixes: list[Prefix], near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that score best among what a layer and head did not select, in every token."""
    read: list[set[tuple[int, ...]]] = []
    drop_ahead = Packs.drop_ahead

    def reads(self: Packs, which: Any, group: Any, chunks: Any) -> None:
        read.append({*zip(which.tolist(), group.tolist(), chunks.tolist(), strict=True)})
        drop_ahead(self, which, group, chunks)

    own = dataclasses.replace(engine.system.own, decoding=partial(KvDriveSelections, near=near))
    system = dataclasses.replace(engine.system, own=own)
    monkeypatch.setattr(Packs, "drop_ahead", reads)
    selected: list[Recorded] = []
    with cold(engine, system=system, host_cache_bytes=0) as other:
        in_engine(other, drive_of(other), texts=selected)
        texts = other.generate(asked(prefixes), SamplingParams(max_tokens=LENGTH)).results()
        groups = other.worker.plan.group_table[:, 0].tolist()
    tokens_of = [token for text in texts for token in text.trace.tokens]
    assert (sum(token.ahead for token in tokens_of) > 0) == (near > 1)
    assert (sum(token.unused for token in tokens_of) > 0) == (near > 1)
    expected = []
    for token in range(LENGTH - 1 if near > 1 else 0):  # re-prefill gives the first
        wanted = set()
        for which, text in enumerate(selected):
            for selection, group in enumerate(groups):
                ids, scores = text[selection][token]
                left = sorted(
                    set(range(prefixes[which].num_chunks)).difference(ids),
                    key=lambda chunk: (-scores[chunk], chunk),
                )
                more = math.ceil(len(ids) * near) - len(ids)
                wanted |= {(which, group, chunk) for chunk in left[:more]}
        expected.append(wanted)
    assert read == expected


def test_what_is_switched_off_is_not_tuned(engine: Engine, prefixes: list[Prefix]) -> None:
    own = dataclasses.replace(
        engine.system.own, decoding=partial(KvDriveSelections, micro_batches=1, even=True)
    )
    with cold(engine, system=dataclasses.replace(engine.system, own=own)) as other:
        sampling = SamplingParams(max_tokens=4)
        found = tune(other, asked(prefixes), sampling, window=3.0)
        drive = drive_of(other)
        assert found.window == drive.times == 3.0 and [n for n, _ in found.seconds] == [1]
        assert not drive.stalls.any() and np.unique(drive.widths).tolist() == [2.0]


def test_a_model_of_one_kv_head_is_served_from_what_is_on_the_device(tmp_path: Path) -> None:
    model = dataclasses.replace(SMALL, num_kv_heads=1)
    with small_engine(
        tmp_path, system=SYSTEMS["kvdrive"], model=model, device_cache_bytes=8 << 20
    ) as one:
        prefix = one.ingest(tokens(300))
        found = [kept_kv(one, asked([prefix]), max_tokens=4) for _ in range(3)]
        assert (found[0][0] == found[1][0]).all() and (found[0][0] == found[2][0]).all()
