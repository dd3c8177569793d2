"""Warm rounds: every system the same requests and memory, from prefixes that share pack files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import warm
from bench.common import Setting
from bench.disk import Disk
from bench.kept import Kept
from bench.lab import Lab
from bench.long_kv import store_prefixes
from bench.measure import Sample, measured
from bench.warm import Rounds, warm_rows, warm_systems
from ckv_jax import Engine
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.systems import SYSTEMS

NAMES = ("ckv-16", "contiguous-kv", "impress", "as-lru")
SETTING = Setting(
    model="tiny", prefix_tokens=520, prefixes=4, repeats=4, budgets=(0.2,), systems=NAMES
)

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(SETTING) as made:
        yield made


def test_layouts_with_the_same_packs_share_their_files_and_hold_the_same_kv(lab: Lab) -> None:
    with Lab(SETTING) as mine:
        stored = store_prefixes(mine, [2], [SYSTEMS[name] for name in NAMES])
        packs = list((mine.folder / "store").glob("segments/*/*/packs/c.*"))
        assert packs and all(file.stat().st_nlink == 2 for file in packs)
        apparent = sum(512 * f.stat().st_blocks for f in (mine.folder / "store").rglob("*.*"))
        once = sum(512 * file.stat().st_blocks for file in packs) / 2
        assert once > 2 * mine.kv_bytes
        assert stored == pytest.approx(apparent - once, abs=0.2e6)  # the catalog goes on growing
        kv = []
        for name in NAMES:
            with mine.engine(name) as engine:
                prefix = mine.prefix(2, engine)
            np.testing.assert_array_equal(prefix.tokens, mine.work.prefix(2))
            kv.append(read_kv(mine.store, prefix))  # checksums and all
            np.testing.assert_array_equal(kv[0], kv[-1])
        assert not mine.prefill_s and np.isfinite(kv[0].astype(np.float32)).all()


@needs_fio
def test_every_system_answers_the_same_requests_in_every_round(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, int, int]] = []
    sizes: dict[str, dict[str, int]] = {}

    def noted(mine: Lab, engine: Engine, index: int, question: int, budget: float) -> Sample:
        asked.append((engine.system.name, index, question))
        names = ("prefetch_device_bytes", "digest_bytes", "device_cache_bytes",
                 "prefetch_host_bytes", "host_cache_bytes")  # fmt: skip
        sizes[engine.system.name] = {name: getattr(engine.config, name) for name in names}
        return measured(mine, engine, index, question, budget)

    monkeypatch.setattr(warm, "measured", noted)
    how = Rounds(rounds=2, fill=6, fill_most=6, device_share=0.2, host_share=0.4)
    with Lab(SETTING) as mine, Disk(tmp_path, seconds=0.1, file_bytes=1 << 20) as disk:
        rows = warm_rows(mine, disk, warm_systems((*NAMES, "recompute")), how, Kept(None, {}))
        total = SETTING.prefixes * mine.kv_bytes
    by_turn = [asked[at : at + 10] for at in range(0, len(asked), 10)]
    assert [turn[0][0] for turn in by_turn] == [*NAMES, *NAMES[2:], *NAMES[:2]]
    same = [[(index, question) for _, index, question in turn] for turn in by_turn]
    assert all(turn == same[0] for turn in same)
    for row in rows:
        assert (row["variant"], row["requests"], row["fill_requests"]) == ("warm", 8, [6, 6])
        assert row["ttft_ms"]["n"] == 8 and len(row["ttft_ms_by_round"]) == 2
        assert row["prefix_tokens"] == 520 and row["data_set_bytes"] == total
        memory = row["memory"]
        assert memory == sizes[row["system"]]
        device = ("prefetch_device_bytes", "digest_bytes", "device_cache_bytes")
        assert sum(memory[name] for name in device) == int(0.2 * total)
        assert memory["prefetch_host_bytes"] + memory["host_cache_bytes"] == int(0.4 * total)
        assert (row["digest_bytes"] > 0) == (row["system"] == "ckv-16")
        assert row["hit_rate"]["device"] + row["hit_rate"]["host"] > 0
        assert all(set(half) == {"device", "host"} for half in row["hit_rate_by_half"])
    assert [row["system"] for row in rows] == list(NAMES)
