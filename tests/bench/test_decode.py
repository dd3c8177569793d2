"""bench.decode runs, and what it says of systems adds up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.decode import COLUMNS, QUICK
from bench.decode_bench import Bench, Setting
from bench.disk import Disk
from bench.kept import Kept
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
