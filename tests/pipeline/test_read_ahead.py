"""When reading ahead pays."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckv_jax.pipeline.executor import READ, Pace, ReadAhead
from ckv_jax.systems import SYSTEMS
from ckv_jax.trace import Span

MS = 10**6


def read(start_ms: int, end_ms: int, size: int, name: str = READ) -> Span:
    return Span(name, "ssd", start_ms * MS, end_ms * MS, {"bytes": size})


def test_reading_ahead_is_tried_until_both_are_known() -> None:
    pace = Pace()
    assert pace.ahead_pays(0)
    pace.selected(1.0)
    assert pace.ahead_pays(0)
    pace.read([read(0, 1, 1000)])
    assert not pace.ahead_pays(0)


def test_it_pays_where_a_period_takes_longer_to_read_than_to_choose() -> None:
    pace = Pace()
    pace.selected(0.004)
    pace.read([read(0, 2, 1000), read(5, 7, 1000)])  # 500 bytes a millisecond
    assert not pace.ahead_pays(1900)
    assert pace.ahead_pays(2100)


def test_reads_at_the_same_time_share_the_clock() -> None:
    pace = Pace()
    pace.selected(0.004)
    overlapping = [read(0, 8, 2000), read(1, 3, 1000), read(6, 9, 1500)]  # 4,500 bytes in 9 ms
    pace.read([read(10, 90, 10, "probe_read"), *overlapping])
    assert not pace.ahead_pays(1900)
    assert pace.ahead_pays(2100)


def test_a_compilation_or_a_stalled_read_changes_little() -> None:
    pace = Pace()
    for seconds in (30.0, 0.004, 0.004):
        pace.selected(seconds)
    for end in (5000, 2, 2):
        pace.read([read(0, end, 1000)])
    assert not pace.ahead_pays(1900)
    assert pace.ahead_pays(2100)


def test_a_request_without_reads_says_nothing() -> None:
    pace = Pace()
    pace.selected(0.004)
    pace.read([read(0, 2, 1000)])
    pace.read([])
    assert pace.ahead_pays(2100)


def test_what_was_attended_to_most_is_read_first() -> None:
    ahead = ReadAhead(SYSTEMS["contiguous-kv"])
    opened: Any = SimpleNamespace(num_chunks=8, opening=np.array([5, 1, 7, 0]), recurrence=0.0)
    chosen: Any = SimpleNamespace(
        ids=np.array([[1, 5, 6], [2, 5, -1]]),
        attention=np.array([[0.1, 0.2, 0.9], [0.4, 0.3, 0.0]], np.float32),
    )
    ahead.remember(opened, chosen)
    assert opened.opening.tolist() == [6, 2, 5, 1]
    assert opened.recurrence == 0.5
    assert ahead.opening(opened, 2).tolist() == [6, 2]


def test_what_recurred_is_a_share_of_what_was_best() -> None:
    """Half of it is enough to read it ahead, where periods are guessed at all."""
    paper = SYSTEMS["contiguous-kv"]
    ahead = ReadAhead(paper)
    opened: Any = SimpleNamespace(opening=np.array([4, 2, 6]), recurrence=0.5)
    assert ahead.opening(opened, 2).tolist() == [4, 2]
    assert ReadAhead(dataclasses.replace(paper, prefetch="none")).opening(opened, 2).size == 0
    opened.recurrence = 0.49
    assert ahead.opening(opened, 2).size == 0
