"""bench.decode runs, and what it says of systems adds up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.decode import COLUMNS, QUICK
from bench.decode_bench import Bench, Setting
from bench.decode_row import Clock, tokens_within
from bench.disk import Disk
from bench.kept import Kept
from bench.long_kv import walking_tokens
from bench.structured import TOPICS
from ckv_jax.storage.store import ChunkStore

SMALL = dataclasses.replace(QUICK, model="tiny", prefix_tokens=1024, tokens=8, warm=2)


class Still(Disk):
    """A disk of known speed."""

    def __init__(self) -> None:
        pass

    def bandwidth(self, block_bytes: int) -> float:
        return 1e9


def rows_of(setting: Setting, folder: Path) -> tuple[Bench, list[dict[str, Any]]]:
    bench = Bench(setting, folder)
    return bench, [
        row for one in bench.systems() for row in bench.rows(one, Still(), Kept(None, {}))
    ]


@pytest.mark.slow
def test_rows_add_up(tmp_path: Path) -> None:
    # Buffers grow from 64 to 128 tokens midway.
    setting = dataclasses.replace(
        SMALL, systems=("quest", "ckv", "flexgen"), sequences=(2,), warm=50, tokens=20,
        row_seconds=1000, device_share=0.5,  # room for what ckv always keeps
    )  # fmt: skip
    _, found = rows_of(setting, tmp_path)
    assert [row["sequences"] for row in found] == [2] * 3
    rows = {row["system"]: row for row in found}
    for row in rows.values():
        assert set(COLUMNS) <= row.keys()
        assert row["tokens_s"] > 0 < row["budget_mb"]
        assert row["compiled"] == 0
    assert rows["quest"]["ratio_to_floor"] is None
    assert rows["ckv"]["ratio_to_floor"] <= rows["ckv"]["step_ms"] / rows["ckv"]["still_ms"]
    quest, ours = rows["quest"], rows["ckv"]
    assert quest["device_hits"] == 0 < ours["device_hits"] < 1
    for row in (quest, ours):
        assert 0 < row["exposed_share"] < 1 <= row["ratio_to_busy"]
    assert rows["flexgen"]["budget"] == 1.0 and rows["flexgen"]["window"] is None
    assert not list(tmp_path.glob("ckv-decode-*"))


@pytest.mark.slow
def test_systems_of_one_layout_share_a_store_and_memory_has_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr("bench.decode_bench.SHM", memory)
    written: list[ChunkStore] = []
    make = ChunkStore.writer

    def counting(self: ChunkStore, **more: Any) -> Any:
        written.append(self)
        return make(self, **more)

    monkeypatch.setattr(ChunkStore, "writer", counting)
    setting = dataclasses.replace(
        SMALL, systems=("retroinfer", "kvdrive"), places=None, sequences=(1,), rising=(2,)
    )
    bench, found = rows_of(setting, disk)
    assert [(row["system"], row["place"], row["sequences"]) for row in found] == [
        ("retroinfer", "ssd", 1), ("kvdrive", "ssd", 1), ("kvdrive", "ssd", 2),
        ("retroinfer", "host", 1), ("kvdrive", "host", 1),
    ]  # fmt: skip
    assert len(written) == 2  # two prefixes, whoever reads them and wherever
    assert bench.left_out == []
    alone, *_ = (row for row in found if row["system"] == "kvdrive")
    copy = found[-1]
    assert copy["bytes_per_token"] > 0 and copy["host_hits"] == 0
    assert copy["device_hits"] == alone["device_hits"]


def test_what_does_not_fit_is_left_out_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.decode_bench.BESIDE", 1 << 60)
    bench, found = rows_of(dataclasses.replace(SMALL, systems=("quest",)), tmp_path)
    assert found == []
    [said] = bench.left_out
    assert said["system"] == "quest" and "GB of memory" in said["why"]


def test_a_slow_row_has_fewer_tokens() -> None:
    assert tokens_within(60, 0.5, warm=16, tokens=64) == (16, 64)
    assert tokens_within(60, 3.0, warm=16, tokens=64) == (10, 10)
    assert tokens_within(60, 1.0, warm=16, tokens=64) == (16, 44)
    assert tokens_within(60, 500.0, warm=16, tokens=64) == (0, 2)


def test_texts_together_and_one_after_the_other_are_timed_alike() -> None:
    """Two texts of five tokens, two of them after the first told apart; a token a second."""
    together = Clock(2, warm=2, total=5)
    for token in range(5):
        for text in range(2):
            together.token(text, 2.0 * token + 0.5 * text, reads=10 * (2 * token + text))
    # The first text is past its warm tokens from 4.0 on, the second ends at 8.5.
    assert (together.warm_s, together.late_s, together.late_reads) == (4.0, 4.5, 50)
    apart = Clock(2, warm=2, total=5)
    for text in range(2):
        for token in range(5):
            apart.token(text, 100.0 * text + token, reads=1000 * text + 10 * token)
    assert (apart.warm_s, apart.late_s, apart.late_reads) == (4.0, 4.0, 40)


def test_texts_keep_to_their_topics() -> None:
    rng = np.random.default_rng(0)
    for stay in (0.0, 0.9):
        topics = walking_tokens(rng, 4000, 4096, stay=stay) % TOPICS
        same = float((topics[1:] == topics[:-1]).mean())
        assert abs(same - (stay + (1 - stay) / TOPICS)) < 0.03
