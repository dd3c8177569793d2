"""bench.decode runs, and what it says of systems adds up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.decode import COLUMNS, QUICK
from bench.decode_bench import Bench, Setting, overlap
from bench.disk import Disk
from bench.kept import Kept
from ckv_jax.storage.store import ChunkStore
from ckv_jax.trace import TraceSpan

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
        SMALL, systems=("retroinfer", "kvdrive"), places=None, sequences=(1,), windows=(2.0,)
    )
    bench, found = rows_of(setting, disk)
    assert [(row["system"], row["place"], row["sequences"]) for row in found] == [
        ("retroinfer", "ssd", 1), ("kvdrive", "ssd", 1),
        ("retroinfer", "host", 1), ("kvdrive", "host", 1),
    ]  # fmt: skip
    assert len(written) == 1  # one prefix, whoever reads it and wherever
    assert bench.left_out == []
    alone, *_ = (row for row in found if row["system"] == "kvdrive")
    copy = found[-1]
    assert copy["bytes_per_token"] > 0 and copy["host_hits"] == 0
    assert copy["device_hits"] == alone["device_hits"]


def test_overlap_is_a_share_of_what_is_moved() -> None:
    def span(lane: str, start: int, end: int) -> TraceSpan:
        return TraceSpan("", lane, start, end, {})

    moved = [span("look-up", 0, 10), span("ssd", 5, 20), span("host memory", 30, 40)]
    assert overlap([*moved, span("fetch", 0, 40)]) == 0.0
    busy = [span("select", 8, 12), span("compute", 10, 14), span("compute", 35, 90)]
    assert overlap([*moved, *busy]) == (6 + 5) / 30
    assert overlap(busy) is None


@pytest.mark.slow
def test_what_is_switched_off_in_kvdrive_is_a_system(tmp_path: Path) -> None:
    names = [f"bench.decode_bench:{name}" for name in ("WHOLE_BATCH", "ONE_BY_ONE")]
    setting = dataclasses.replace(
        SMALL, systems=("kvdrive", *names), sequences=(2,), windows=(2.0,), device_share=0.5
    )
    _, found = rows_of(setting, tmp_path)
    whole, none = found[1:]
    assert [row["system"] for row in found[1:]] == [
        "kvdrive, no micro-batches", "kvdrive, none of these"
    ]  # fmt: skip
    assert found[0]["overlap"] >= 0 and found[0]["window"] == 2.0
    assert whole["micro_batches"] == none["micro_batches"] == 1
    assert none["ahead_share"] == 0.0
