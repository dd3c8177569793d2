"""bench.decode runs, and what it says of systems adds up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench import decode
from bench.disk import Disk
from bench.long_kv import walking_tokens
from bench.structured import TOPICS


class Still(Disk):
    """A disk of known speed."""

    def __init__(self) -> None:
        pass

    def bandwidth(self, block_bytes: int) -> float:
        return 1e9


@pytest.mark.slow
def test_rows_add_up(tmp_path: Path) -> None:
    setting = dataclasses.replace(
        decode.QUICK, model="tiny", prefix_tokens=1024, systems=("quest", "ckv", "flexgen"),
        sequences=(1, 2),
    )  # fmt: skip
    bench = decode.Bench(setting, tmp_path)
    rows = {name: bench.rows(name, "ssd", Still())[-1] for name in setting.systems}
    for row in rows.values():
        assert set(decode.COLUMNS) <= row.keys()
        assert row["tokens_s"] > 0
    quest, ours = rows["quest"], rows["ckv"]
    assert quest["device_hits"] == 0 < ours["device_hits"] < 1
    for row in (quest, ours):
        assert 0 < row["exposed_share"] < 1 <= row["ratio_to_floor"]
    assert not list(tmp_path.glob("ckv-decode-*"))


def test_texts_keep_to_their_topics() -> None:
    rng = np.random.default_rng(0)
    for stay in (0.0, 0.9):
        topics = walking_tokens(rng, 4000, 4096, stay=stay) % TOPICS
        same = float((topics[1:] == topics[:-1]).mean())
        assert abs(same - (stay + (1 - stay) / TOPICS)) < 0.03
