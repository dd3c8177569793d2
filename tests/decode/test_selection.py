"""Which prefixes are scored in one call, and what the host reads of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ckv_jax.decode.scoring import Record
from ckv_jax.decode.selection import RowSelector, by_prefix


def selector(opened: Any, limit: int = 5, *, apart: bool = False) -> RowSelector:
    window: Any = SimpleNamespace(opened=opened)
    nothing: Any = None
    return RowSelector(limit=limit, digest=nothing, window=window, apart=apart)


def test_rows_of_a_prefix_are_together_and_padded() -> None:
    one, other = object(), object()
    rows = {4: selector(one), 0: selector(other, 3), 2: selector(one, 7), 1: selector(one)}
    rows[5] = selector(one, apart=True)
    first, second, third = by_prefix(rows, 1.3)
    assert [on.which for on in (first, second, third)] == [0, 1, 2]
    assert first.opened is other and first.rows.tolist() == [0] and first.near.tolist() == [4]
    assert second.selectors == [rows[1], rows[2], rows[4]]
    assert second.rows.tolist() == [1, 2, 4, 0] and second.limits.tolist() == [5, 7, 5, 0]
    assert second.near.tolist() == [7, 10, 7, 0]
    assert third.rows.tolist() == [5]


def test_a_record_is_one_array_of_all_that_the_host_reads() -> None:
    ids, slots, misses, near = np.arange(2 * 3 * 4, dtype=np.int32).reshape(4, 2, 3)
    attention, mass = np.full((2, 3), 0.25, np.float32), np.full((2, 1), 0.75, np.float32)
    floats = np.concatenate([attention, mass], axis=1).view(np.int32)
    record = np.concatenate([ids, slots, misses, near, floats], axis=1)
    for rows in (slice(0, 2), np.array([1])):
        found = Record.of(record[rows])
        parts = ids, slots, misses, near, attention, mass[:, 0]
        for mine, part in zip(found, parts, strict=True):
            assert mine.tolist() == part[rows].tolist()
