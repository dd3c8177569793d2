"""What one prefix's rows of a batch have of what was chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.pipeline.batch import Batch, Member
from ckv_jax.selection.base import Share

ALL, SOME = 1.0, 0.5


def member(*mass: float) -> Member:
    """Two rows that may choose 20 and 3 chunks."""
    nothing: Any = None
    return Member(
        opened=nothing, probes=nothing, rows=np.arange(2, dtype=np.int32),
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


def prefix(num_tokens: int, *chunk_lengths: int) -> tuple[Any, Any]:
    """A prefix with chunks of so many valid tokens."""
    lengths = np.array(chunk_lengths, np.int32)
    return SimpleNamespace(
        prefix=SimpleNamespace(num_tokens=num_tokens), chunk_lengths=lengths
    ), None


@pytest.fixture
def batch() -> Batch:
    """Four suffixes over two prefixes: three on the first, one on the second."""
    suffixes = [np.arange(1, size + 1, dtype=np.int32) for size in (3, 17, 1, 2)]
    prefixes = [prefix(40, 16, 16, 8), prefix(20, 16, 4)]
    share = Share(np.array([0.5, 0.6, 0.7, 0.8]), np.array([1, 2, 3, 4]))
    return Batch.of(suffixes, [2, 3, 1, 2], prefixes, [0, 1, 0, 0], share)


def test_suffixes_over_several_prefixes_are_padded_for_each(batch: Batch) -> None:
    assert batch.tokens.shape == (4, 32)
    assert batch.tokens[1].tolist() == [*range(1, 18), *[0] * 15]
    assert batch.lengths.tolist() == [3, 17, 1, 2]
    assert batch.start.tolist() == [40, 20, 40, 40]
    first, second = batch.members
    assert first.rows.tolist() == [0, 2, 3, 0]  # the last is padding
    assert first.lengths.tolist() == [3, 1, 2, 0] and first.limits.tolist() == [2, 1, 2, 0]
    assert first.share.mass.tolist() == pytest.approx([0.5, 0.7, 0.8, 0.5])
    assert first.share.least.tolist() == [1, 3, 4, 1]
    assert first.real.tolist() == [0, 2, 3]
    assert (second.rows.tolist(), second.lengths.tolist()) == ([1], [17])


def test_no_row_of_padding_is_real() -> None:
    suffixes = [np.array([5], np.int32)] * 6
    prefixes = [prefix(40, 16), prefix(20, 16)]
    batch = Batch.of(suffixes, [2] * 6, prefixes, [0, 0, 1, 0, 0, 0])
    first, second = batch.members
    assert first.rows.tolist() == [0, 1, 3, 4, 5, 0, 0, 0]
    assert first.lengths.tolist() == [1] * 5 + [0] * 3
    assert first.limits.tolist() == [2] * 5 + [0] * 3
    assert (first.real.tolist(), second.real.tolist()) == ([0, 1, 3, 4, 5], [2])


def test_suffixes_over_one_prefix_are_padded_once() -> None:
    batch = Batch.of([np.array([5], np.int32)] * 3, [2, 2, 2], [prefix(40, 16)], [0] * 3)
    (member,) = batch.members
    assert member.rows.tolist() == [0, 1, 2, 3] and member.real.tolist() == [0, 1, 2]
    assert batch.limits.tolist() == [2, 2, 2, 0] and batch.start.tolist() == [40, 40, 40, 0]
    assert member.share.mass.tolist() == [1.0] * 4 and member.share.least.tolist() == [1] * 4
    assert batch.owners().tolist() == [0, 0, 0, -1]
    assert batch.by_row([np.ones((4, 1, 1), np.int32)]).tolist() == [[[1], [1], [1], [-1]]]


def test_what_each_members_rows_chose_goes_to_their_places(batch: Batch) -> None:
    """Two choices of a row; the padding's are nobody's."""
    first = np.array([[[0, 1], [2, -1]], [[1, -1], [0, -1]], [[0, 2], [1, 2]], [[9, 9], [9, 9]]])
    chosen = batch.by_row([first, np.array([[[1, 0, -1], [0, 1, 1]]])])
    nothing = -1
    assert chosen.tolist() == [
        [[0, 1, nothing], [1, 0, nothing], [1, -1, nothing], [0, 2, nothing]],
        [[2, -1, nothing], [0, 1, 1], [0, -1, nothing], [1, 2, nothing]],
    ]
    assert batch.valid(chosen).tolist() == [
        [[16, 16, 0], [4, 16, 0], [16, 0, 0], [16, 8, 0]],
        [[8, 0, 0], [16, 4, 4], [16, 0, 0], [16, 8, 0]],
    ]
    assert batch.owners().tolist() == [0, 1, 0, 0]
    alone = np.array([[[2, 1, 0]]])  # one choice of three chunks
    chosen = batch.by_row([np.repeat(alone, 4, axis=0), alone])
    assert chosen.tolist() == [[[2, 1, 0]] * 4]


def test_a_rows_share_of_attention_is_the_mean_of_its_choices(batch: Batch) -> None:
    first = np.array([0.2, 0.4, 0.5, 0.7, 0.8, 1.0, 0.0, 0.0])
    second = np.array([0.1, 0.2])
    assert batch.masses([[first, second]] * 2) == pytest.approx(
        np.array([[0.3, 0.15, 0.6, 0.9]] * 2)
    )
