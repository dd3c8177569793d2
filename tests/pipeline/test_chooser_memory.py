"""What a row remembers of earlier choices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ckv_jax.pipeline.chooser import Chooser
from ckv_jax.pipeline.prefix_rows import PrefixRows
from ckv_jax.selection.select import Select

CHUNKS = 3


def chooser(queries: int = 1) -> Any:
    window: Any = SimpleNamespace(resident=SimpleNamespace(probe_chunks=CHUNKS, num_chunks=CHUNKS))
    nothing: Any = None
    return Chooser(
        select=Select(queries=queries), limit=5, probes=nothing, window=window, source=nothing,
        widths=nothing, packs=np.ones(1),
    )  # fmt: skip


def test_the_tokens_that_choose_together_are_the_latest_before_it() -> None:
    one = chooser(queries=3)
    for at, score in ((300, 1), (301, 2), (302, 4), (303, 8)):
        one.remember(0, at, np.full((2, CHUNKS), score, np.float32))
    assert one.before(0, 304).tolist() == [[12.0] * CHUNKS] * 2
    assert one.before(0, 303).tolist() == [[6.0] * CHUNKS] * 2  # it is tried again
    assert one.before(1, 304).tolist() == [[0.0]]


def test_rows_of_a_prefix_add_what_each_remembers() -> None:
    """The last row is padding."""
    alone, several, third = chooser(), chooser(queries=2), chooser()
    several.remember(1, 8, np.arange(2 * CHUNKS, dtype=np.float32).reshape(2, CHUNKS))
    rows = PrefixRows.of([(4, alone), (1, several), (2, third)], 1.3)
    assert rows.rows.tolist() == [4, 1, 2, 0] and rows.near.tolist() == [7, 7, 7, 0]
    assert rows.limits.tolist() == [5, 5, 5, 0]
    lengths = np.array([0, 10, 10, 0, 10])
    before = rows.before(1, 2, lengths)
    assert before.tolist() == [*[[0.0] * 3] * 2, [0.0, 1.0, 2.0], [3.0, 4.0, 5.0], *[[0.0] * 3] * 4]
