"""Requests against filled caches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.common import Setting
from bench.lab import KEPT, Lab
from bench.turns import DEVICE_SHARE, HOST_SHARE, equal_memory
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import SYSTEMS


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with Lab(Setting(model="tiny", prefix_tokens=1024, prefixes=3)) as lab:
        yield lab


def test_a_prefix_is_computed_once_for_all_benchmarks_and_nothing_learned_of_it_is_kept(
    shared: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEPT, str(tmp_path / "prefixes"))
    setting, answers = Setting(model="tiny", prefix_tokens=300, prefixes=1), []
    for computed in (1, 0):
        with Lab(setting) as lab, lab.engine("impress") as engine:
            lab.warm(engine, 0, [0.2])  # reorders
            answers.append(lab.ask(engine, 0, 5, 1.0)[1].logits)
            assert len(lab.prefill_s) == computed
    np.testing.assert_array_equal(*answers)
    with ChunkStore.open(tmp_path / "prefixes") as store:
        assert [prefix.layout.hex for prefix in store.prefixes()] == [shared.base.layout.hex]


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
    assert sizes["device_cache_bytes"] > 0 or system.digest != "none"
    assert (sizes["digest_bytes"] > 0) == (system.digest != "none")
    with lab.engine(system, memory=sizes) as engine:
        for prefix in range(3):
            lab.ask(engine, prefix, prefix, 0.2)
        stats = engine.stats()
        assert stats.digest_bytes <= sizes["digest_bytes"]
        assert (stats.digest_bytes > 0) == (system.digest != "none")
