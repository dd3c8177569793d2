"""What a batch is told of its packs, by their codes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.reads.pack_table import WAITING, PackTable


@pytest.fixture
def table() -> PackTable:
    """Of one prefix with two layer groups of eight chunks."""
    layout = SimpleNamespace(groups=2, probe_layers=())
    view = SimpleNamespace(
        prefix=SimpleNamespace(layout=layout),
        first_page=np.arange(8),
        page_stride=np.full(8, 8),
    )
    source: Any = SimpleNamespace(prefix=view, kind="pack")
    return PackTable([source])


def test_looking_for_some_leaves_no_mark_for_the_next_search(table: PackTable) -> None:
    codes = np.array([3, 9, 12, 3])
    assert table.among(codes, np.array([9, 3, 15])).tolist() == [True, True, False, True]
    assert table.among(codes, np.array([12])).tolist() == [False, False, True, False]
    assert table.among(codes, codes[:0]).tolist() == [False] * 4


def test_reads_are_told_in_the_order_in_which_they_began(table: PackTable) -> None:
    table.read[[2, 5, 6, 11]] = 4, 2, WAITING, 7
    every = np.arange(16)
    assert table.reads(every) == [2, 4, 7] and table.first_read(every) == 2
    assert table.reads(table.of_group(0, 1)) == [7]
    assert table.reads(np.array([6, 7])) == [] and table.first_read(np.array([6, 7])) is None
