"""What a row remembers of earlier choices, and when its queries have turned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.pipeline.chooser import Chooser
from ckv_jax.pipeline.prefix_rows import PrefixRows
from ckv_jax.selection.select import Select

CHUNKS = 3


def chooser(
    *, queries: int = 1, every: int = 4, first: int = 300, drift: float | None = None
) -> Any:
    window: Any = SimpleNamespace(resident=SimpleNamespace(probe_chunks=CHUNKS, num_chunks=CHUNKS))
    nothing: Any = None
    return Chooser(
        select=Select(queries=queries, every=every, drift=drift), limit=5, first=first,
        probes=nothing, window=window, source=nothing, widths=nothing, packs=np.ones(1),
    )  # fmt: skip


def test_after_moving_the_next_token_chooses_wherever_it_is() -> None:
    one = chooser(every=100)
    one.moved(16, int("900"), None, None)  # no small number
    assert [one.due(at) for at in (899, 900, 901)] == [False, True, False]


@pytest.mark.parametrize(("cosine", "turned"), [(0.71, True), (0.7, False)])
def test_queries_have_turned_when_their_cosine_in_one_layer_is_below(
    cosine: float, turned: bool
) -> None:
    """Two layers of two heads; the second is as it was but for its length."""
    one = chooser(drift=0.0)
    then = np.array([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 3.0], [4.0, 0.0]]], np.float32)
    one.chose(0, then)
    now = np.array([[[0.0, 2.0], [2.0, 0.0]], [[0.0, 0.3], [0.4, 0.0]]], np.float32)
    assert not one.turned(0, 400, now, 0.49)  # half of the first layer's squares
    assert one.turned(0, 400, now, 0.51)
    now[0] = [[1.0, 0.0], [1.0, np.sqrt(2 / 0.7**2 - 2 - 1e-3)]]  # a little above 0.7
    assert one.turned(0, 400, now, cosine) == turned
    now[...] = 0
    assert one.turned(0, 400, now, 1e-9) and not one.turned(0, 400, now, 0.0)


def test_the_tokens_that_choose_together_are_the_latest_before_it() -> None:
    one = chooser(queries=3)
    for at, score in ((300, 1), (301, 2), (302, 4), (303, 8)):
        one.remember(0, at, np.full((2, CHUNKS), score, np.float32))
    assert one.before(0, 304).tolist() == [[12.0] * CHUNKS] * 2
    assert one.before(0, 303).tolist() == [[6.0] * CHUNKS] * 2  # it is tried again
    assert one.before(1, 304).tolist() == [[0.0]]


def test_rows_of_a_prefix_add_what_each_remembers() -> None:
    """Only one of them is due, and the last row is padding."""
    alone, several, third = chooser(first=6), chooser(queries=2, first=7), chooser(first=8)
    several.remember(1, 8, np.arange(2 * CHUNKS, dtype=np.float32).reshape(2, CHUNKS))
    rows = PrefixRows.of([(4, alone), (1, several), (2, third)], 1.3)
    assert rows.rows.tolist() == [4, 1, 2, 0] and rows.near.tolist() == [7, 7, 7, 0]
    lengths = np.array([0, 10, 10, 0, 10])
    assert rows.limits(lengths).tolist() == [0, 5, 0, 0]
    before = rows.before(1, 2, lengths)
    assert before.tolist() == [*[[0.0] * 3] * 2, [0.0, 1.0, 2.0], [3.0, 4.0, 5.0], *[[0.0] * 3] * 4]
