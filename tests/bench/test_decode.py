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


def test_texts_together_and_one_after_the_other_are_timed_alike() -> None:
    """Two texts of five tokens, two of them after the first told apart; a token a second."""
    together = decode.Clock(2, warm=2, total=5)
    for token in range(5):
        for text in range(2):
            together.token(text, 2.0 * token + 0.5 * text, reads=10 * (2 * token + text))
    # The first text is past its warm tokens from 4.0 on, the second ends at 8.5.
    assert (together.warm_s, together.late_s, together.late_reads) == (4.0, 4.5, 50)
    apart = decode.Clock(2, warm=2, total=5)
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
