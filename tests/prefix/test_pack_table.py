"""What a batch is told of its packs, by their codes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.prefix.pack_table import WAITING, PackTable


@pytest.fixture
def table() -> PackTable:
    """Of one prefix with two layer groups of eight chunks."""
    layout = SimpleNamespace(groups=2, probe_layers=())
    source: Any = SimpleNamespace(
        kind="pack",
        prefix=SimpleNamespace(layout=layout),
        first_page=np.arange(8),
        page_stride=np.full(8, 8),
    )
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


@pytest.fixture
def two() -> PackTable:
    """Of two prefixes, of three chunks and of five, with two layer groups each."""
    layout = SimpleNamespace(groups=2, probe_layers=(0, 4, 8))
    sources: Any = [
        SimpleNamespace(
            kind="pack",
            prefix=SimpleNamespace(layout=layout),
            first_page=first + np.arange(count),
            page_stride=np.full(count, stride),
        )
        for first, count, stride in ((100, 3, 10), (500, 5, 50))
    ]
    return PackTable(sources)


EVERY = [(0, g, c) for g in range(2) for c in range(3)] + [
    (1, g, c) for g in range(2) for c in range(5)
]
"""(prefix, layer group, chunk) of all packs of `two`."""


def test_a_code_is_of_one_pack_alone_and_leads_to_its_page(two: PackTable) -> None:
    which, group, chunk = np.array(EVERY).T
    codes = two.codes(which, group, chunk)
    assert len(set(codes.tolist())) == len(EVERY)
    assert [tuple(map(int, one)) for one in zip(*two.parts(codes), strict=True)] == EVERY
    wanted = [(100 + c + 10 * g, 500 + c + 50 * g)[w] for w, g, c in EVERY]
    assert two.pages(codes).tolist() == wanted
    assert two.codes(1, 1, np.arange(3, 5)).tolist() == codes[-2:].tolist()


def test_the_codes_of_a_group_are_a_range(two: PackTable) -> None:
    for which, group, chunks in ((0, 0, 3), (0, 1, 3), (1, 0, 5), (1, 1, 5)):
        mine = two.codes(which, group, np.arange(chunks))
        some = two.of_group(which, group)
        assert len(some) == 5 and list(some)[:chunks] == mine.tolist()


def test_a_probe_has_a_row_for_each_of_its_layers() -> None:
    layout = SimpleNamespace(groups=2, probe_layers=(0, 4, 8))
    source: Any = SimpleNamespace(
        kind="probe", prefix=SimpleNamespace(layout=layout), first_page=np.arange(2),
        page_stride=np.full(2, 2),
    )  # fmt: skip
    table = PackTable([source])
    assert table.pages(table.codes(0, 2, np.arange(2))).tolist() == [4, 5]
    assert table.device(table.codes(0, 2, np.arange(2))).tolist() == [-1, -1]
    with pytest.raises(IndexError):
        table.device(table.codes(0, 3, np.arange(2)))


def test_one_read_brings_packs_of_one_prefix_and_no_more_than_it_may(two: PackTable) -> None:
    which, group, chunk = np.array(EVERY).T
    codes = two.codes(which, group, chunk)
    mixed = codes[np.random.default_rng(0).permutation(len(codes))]

    def shape(*, single: bool, most: int) -> list[tuple[int, set[int], int]]:
        parts = two.by_read(mixed, single=single, most=most)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.sort(codes))
        found = []
        for part in parts:
            of, groups, _ = two.parts(part)
            assert len(set(of.tolist())) == 1
            found.append((int(of[0]), set(groups.tolist()), len(part)))
        return found

    assert shape(single=False, most=10) == [(0, {0, 1}, 6), (1, {0, 1}, 10)]
    assert [n for _, _, n in shape(single=False, most=6)] == [6, 5, 5]
    alone = [(0, {0}, 3), (0, {1}, 3), (1, {0}, 5), (1, {1}, 5)]
    assert shape(single=True, most=5) == alone
    assert [n for _, _, n in shape(single=True, most=4)] == [3, 3, 3, 2, 3, 2]
    assert two.by_read(codes[:0], single=False, most=4) == []


def test_packs_are_where_they_were_put_until_they_are_cleared(two: PackTable) -> None:
    codes = two.codes(1, 0, np.arange(5))
    assert two.device(codes).tolist() == two.host(codes).tolist() == [-1] * 5
    assert not two.known(codes).any()
    two.put(codes[:2], np.array([0, 7]))
    two.put(codes[2:4], np.array([-1, 3]), np.array([0, 4]))
    assert two.device(codes).tolist() == [0, 7, -1, 3, -1]
    assert two.host(codes).tolist() == [-1, -1, 0, 4, -1]
    assert two.known(codes).tolist() == [True] * 4 + [False]
    two.pinned[codes[3]] = two.fresh[codes[1]] = True
    assert two.held(two.every).tolist() == codes[:4].tolist()
    assert two.held(two.of_group(1, 1)).tolist() == []
    two.clear(codes[1:3])
    assert two.held(two.of_group(1, 0)).tolist() == codes[[0, 3]].tolist()
    assert np.flatnonzero(two.pinned).tolist() == [codes[3]] and not two.fresh.any()
    assert two.known(codes).tolist() == [True, False, False, True, False]
    assert two.device(codes).tolist() == [0, -1, -1, 3, -1]
    assert two.host(codes).tolist() == [-1, -1, -1, 4, -1]
