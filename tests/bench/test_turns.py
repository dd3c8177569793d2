"""Requests against filled caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.common import Setting, parser, setting_of
from bench.lab import KEPT, Lab
from bench.measure import Sample, hit_rate
from bench.turns import (
    DEVICE_SHARE,
    HOST_SHARE,
    equal_memory,
    warm_requests,
)
from bench.warm import Rounds, one_round
from ckv_jax.data.reference import reference_folder
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


@pytest.mark.parametrize("wrong", ["json", "examples", "folder", "task"])
def test_what_is_wrong_with_a_checkpoint_or_its_task_is_told_and_nothing_stays(
    tmp_path: Path, wrong: str
) -> None:
    lines = '{"text": "a", "label": "b"}\n'
    train, test, store = tmp_path / "train.jsonl", tmp_path / "test.jsonl", tmp_path / "store"
    train.write_text({"json": lines + "{", "examples": ""}.get(wrong, lines))
    test.write_text(lines)
    (tmp_path / "empty").mkdir()
    folder = tmp_path / "empty" if wrong == "folder" else reference_folder()
    words = ["--checkpoint", folder, "--train", train, "--test", test, "--folder", store]
    words += [] if wrong == "task" else ["--task", "sst2"]
    p = parser("", quick=Setting(), full=Setting(prefixes=1, shots=1))
    said = {"json": r"train\.jsonl:2", "examples": "no examples in", "folder": "empty"}
    with pytest.raises(SystemExit, match=said.get(wrong, "no task")) as raised:
        Lab(setting_of(p.parse_args(list(map(str, words)))))
    assert raised.value.code not in (None, 0)
    assert not store.exists() or not list(store.iterdir())


def test_a_policy_learns_nothing_from_the_one_before() -> None:
    """Scores outlive an engine in the store; of two policies the second would know the future."""
    system = dataclasses.replace(SYSTEMS["contiguous-kv"], policy="lfu")
    with Lab(Setting(model="tiny", prefix_tokens=512, prefixes=3)) as lab:
        how, asked = Rounds(fill=9, fill_most=9), warm_requests(lab, 18)
        for index in range(3):
            lab.ingest(index, [system])
        rounds = [one_round(lab, system, 0.2, asked, how) for _ in range(2)]
        hits = [hit_rate([Sample(**sample) for sample in one["samples"]]) for one in rounds]
        prefix = lab.prefix(0, lab.engine(system))
        scores = lab.store.load_scores(prefix.spans[0].segment_id)
        assert scores is not None and scores[1].any()
        lab.forget_scores()
        scores = lab.store.load_scores(prefix.spans[0].segment_id)
        assert scores is not None and not scores[0].any() and not scores[1].any()
    assert hits[0] == hits[1] and hits[0]["device"] > 0


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
