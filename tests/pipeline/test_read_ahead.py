"""When reading ahead pays."""

from __future__ import annotations

from ckv_jax.pipeline.executor import READ, Pace
from ckv_jax.trace import Span

MS = 10**6


def read(start_ms: int, end_ms: int, size: int, name: str = READ) -> Span:
    return Span(name, "ssd", start_ms * MS, end_ms * MS, {"bytes": size})


def test_it_pays_where_a_period_takes_longer_to_read_than_to_select() -> None:
    pace = Pace()
    pace.selected(0.004)
    pace.read([read(0, 2, 1000), read(5, 7, 1000)])  # 500 bytes a millisecond
    assert not pace.ahead_pays(1900)
    assert pace.ahead_pays(2100)
