"""Requests against filled caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from bench.common import Setting
from bench.lab import Lab
from bench.turns import DEVICE_SHARE, HOST_SHARE, equal_memory, warm_run
from ckv_jax.systems import SYSTEMS


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with Lab(Setting(model="tiny", prefix_tokens=1024, prefixes=3)) as lab:
        yield lab


def test_a_policy_learns_nothing_from_the_one_before(shared: Lab) -> None:
    """Scores outlive an engine in the store; of two policies the second would know the future."""
    system = dataclasses.replace(SYSTEMS["contiguous-kv"], policy="lfu")
    with Lab(Setting(model="tiny", prefix_tokens=512, prefixes=3), like=shared) as lab:
        rows = [warm_run(lab, system, "warm", 0.2, requests=18).row() for _ in range(2)]
        prefix = lab.prefix(0, lab.engine(system))
        scores = lab.store.load_scores(prefix.spans[0].segment_id)
        assert scores is not None and scores[1].any()
        lab.forget_scores()
        scores = lab.store.load_scores(prefix.spans[0].segment_id)
        assert scores is not None and not scores[0].any() and not scores[1].any()
    assert rows[0]["hit_rate"] == rows[1]["hit_rate"]


@pytest.mark.parametrize("name", ["contiguous-kv", "ckv", "impress", "as-h2o-lfu", "as-lru"])
def test_every_system_has_the_same_memory(shared: Lab, name: str) -> None:
    """Buffers and digests are paid from it (§4.5), and the run holds no more."""
    system, lab = SYSTEMS[name], shared
    sizes = equal_memory(lab, system)
    total = 3 * lab.kv_bytes
    device = ("prefetch_device_bytes", "digest_bytes", "device_cache_bytes")
    assert sum(sizes[part] for part in device) == int(DEVICE_SHARE * total)
    host = ("prefetch_host_bytes", "host_cache_bytes")
    assert sum(sizes[part] for part in host) == int(HOST_SHARE * total)
    assert min(sizes[part] for part in (device[0], *host)) > 0
    assert sizes["device_cache_bytes"] > 0 or system.probe == "digest"
    assert (sizes["digest_bytes"] > 0) == (system.probe == "digest")
    with lab.engine(system, memory=sizes) as engine:
        for prefix in range(3):
            lab.ask(engine, prefix, prefix, 0.2)
        stats = engine.stats()
        assert stats.digest_bytes <= sizes["digest_bytes"]
        assert (stats.digest_bytes > 0) == (system.probe == "digest")
