"""What one prefix's rows of a batch have of what was chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckv_jax.pipeline.batch import Member
from ckv_jax.selection.base import Share

ALL, SOME = 1.0, 0.5


def member(*mass: float) -> Member:
    """Two rows that may choose 20 and 3 chunks."""
    nothing: Any = None
    return Member(
        resident=nothing, probes=nothing, rows=np.arange(2, dtype=np.int32),
        lengths=np.ones(2, np.int32), limits=np.array([20, 3], np.int32),
        share=Share(np.array(mass, np.float32), np.ones(2, np.int32)),
    )  # fmt: skip


def chosen(*counts: int) -> np.ndarray:
    """Ids [b, 64], of which so many are there."""
    places = np.arange(64, dtype=np.int32)[None, :]
    return np.where(places < np.array(counts)[:, None], places, -1)


def test_where_limits_decide_there_are_as_many_columns_as_the_largest_allows() -> None:
    assert member(ALL, ALL).trimmed(chosen(9, 3)).shape == (2, 20)


def test_where_attention_decides_of_some_row_there_are_as_many_as_were_chosen() -> None:
    assert member(ALL, SOME).trimmed(chosen(9, 3)).shape == (2, 10)  # a bucket of 9
    assert member(SOME, SOME).trimmed(chosen(2, 11)).shape == (2, 12)
