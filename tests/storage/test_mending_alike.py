"""Segments of alike tokens are put right where they lie: packs, and which tokens are in them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from segment_support import ALIKE as LAYOUT
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Prefix, SegmentDamaged, verify_store
from ckv_jax.storage.tools.inspect import inspect_store
from ckv_jax.storage.tools.verify import planned_repairs
from tests.support.truth import ingest, kv_of, read_all, some_tokens

BEGIN = 16 * 8
"""Where the second segment begins; of its twelve chunks and a part two runs of four are grouped."""
TOKENS = some_tokens(BEGIN + 16 * 12 + 5)
HERE = 12
"""The first chunk of the last run."""
KV = kv_of(LAYOUT, TOKENS)
NOISE = np.random.default_rng(0).standard_normal(KV.shape)
NEARLY = (KV.astype(np.float32) * (1 + NOISE / 64)).astype(KV.dtype)
"""As if computed again in another order: most bits differ, and not by much."""


pytestmark = pytest.mark.usefixtures("short_runs")


@pytest.fixture
def prefix(folder: Path) -> Prefix:
    with ChunkStore.open(folder) as store:
        ingest(store, TOKENS[:BEGIN], layout=LAYOUT)
        made = ingest(store, TOKENS, layout=LAYOUT)
    assert [span.num_chunks for span in made.spans] == [8, 13]
    return made


def packs(folder: Path, prefix: Prefix, group: int, chunks: list[int]) -> None:
    """Flip a bit in the second segment's packs of a group."""
    shards = sorted(segment_folder(folder, prefix, 1).glob("packs/c.*"))
    shard, row = divmod(group, LAYOUT.shard_groups)
    for chunk in chunks:
        hurt(shards[shard], (row * 13 + chunk - BEGIN // 16) * LAYOUT.pack_bytes + 3)


def assignment(folder: Path, prefix: Prefix, group: int) -> None:
    """Flip a bit in the second segment's row of a group."""
    (shard,) = segment_folder(folder, prefix, 1).glob("assignment/c.*")
    hurt(shard, 2 * (len(TOKENS) - BEGIN) * group + 40)


def written(folder: Path, prefix: Prefix) -> dict[str, bytes]:
    files = segment_folder(folder, prefix, 1).rglob("*")
    return {str(path): path.read_bytes() for path in files if path.is_file()}


def orders(store: ChunkStore, prefix: Prefix) -> np.ndarray:
    with store.reader(prefix) as reader:
        return reader.order


def mend(store: ChunkStore, kv: np.ndarray = KV) -> int:
    """Put the first bad chunks right, as an engine does that computes this KV."""
    marked = find(store, TOKENS, LAYOUT, marked=True)
    assert marked.num_tokens == len(TOKENS)
    bad = store.marked_chunks(marked).tolist()
    with store.reader(marked) as reader:
        together, tokens = reader.reach(bad)
    assert bad[0] in together
    return store.replace_packs(marked, tokens.start // 16, kv[:, :, tokens.start : tokens.stop])


def test_a_bad_pack_is_made_of_its_own_tokens_where_it_lies(folder: Path, prefix: Prefix) -> None:
    before = written(folder, prefix)
    packs(folder, prefix, 1, [HERE + 2])
    with ChunkStore.open(folder) as store:
        assert read_all(store, prefix).refused == 1
        assert find(store, TOKENS, LAYOUT).num_tokens == HERE * 16
        marked = find(store, TOKENS, LAYOUT, marked=True)
        order = orders(store, prefix)
        with store.reader(marked) as reader:
            together, tokens = reader.reach([HERE + 2])
        last = order[:, (HERE + 2) * 16 : (HERE + 3) * 16].max()
        assert together == [HERE + 2] and tokens.start == HERE * 16
        assert last < tokens.stop <= last + 16  # no more than up to the chunk's last token
        assert mend(store) == 1
        assert find(store, TOKENS, LAYOUT) == prefix and verify_store(store).ok
        assert read_all(store, prefix).right == LAYOUT.groups * prefix.num_chunks
    assert written(folder, prefix) == before


@pytest.mark.parametrize("kv", [KV, NEARLY], ids=["the same bits", "other bits"])
@pytest.mark.parametrize("bad", [[], [HERE + 2]], ids=["all packs good", "a bad pack"])
def test_a_lost_assignment_is_found_again(
    folder: Path, prefix: Prefix, kv: np.ndarray, bad: list[int]
) -> None:
    before = written(folder, prefix)
    assignment(folder, prefix, 2)
    packs(folder, prefix, 2, bad)
    with ChunkStore.open(folder) as store:
        assert read_packs(store, prefix) == len(bad)
        with store.reader(prefix) as reader, pytest.raises(SegmentDamaged, match="assignment"):
            _ = reader.order
        assert find(store, TOKENS, LAYOUT).num_tokens == BEGIN
        assert mend(store, kv) == 1 + len(bad)
        found = find(store, TOKENS, LAYOUT)
        assert found.num_tokens == len(TOKENS) and verify_store(store).ok
    if kv is KV or not bad:
        assert written(folder, prefix) == before


def read_packs(store: ChunkStore, prefix: Prefix) -> int:
    """Read all packs, and no order; returns the bad ones."""
    out = np.empty((prefix.num_chunks, *LAYOUT.pack_shape), LAYOUT.numpy_dtype)
    every = np.arange(prefix.num_chunks)
    with store.reader(prefix) as reader:
        good = [reader.read_packs(group, every, out) for group in range(LAYOUT.groups)]
    return int((~np.array(good)).sum())


def test_what_cannot_be_told_is_told_of_and_not_written(
    folder: Path, prefix: Prefix, caplog: pytest.LogCaptureFixture
) -> None:
    """Two packs of a run and the assignment are bad, and keys differ: whose tokens are whose?"""
    before = orders_of(folder, prefix)
    assignment(folder, prefix, 2)
    packs(folder, prefix, 2, [HERE + 1, HERE + 2])
    with ChunkStore.open(folder) as store:
        assert read_packs(store, prefix) == 2
        with store.reader(prefix) as reader:
            assert reader.lost_orders() == [8]
            with caplog.at_level(logging.WARNING):
                again = reader.order_by(lambda g, start, end: NEARLY[g // 2, 0, start:end, g % 2])
        assert "the assignment of tokens to packs is damaged for 1 heads" in caplog.text
        pair = slice((HERE + 1) * 16, (HERE + 3) * 16)  # between them they have all that they had
        np.testing.assert_array_equal(np.sort(again[2, pair]), np.sort(before[2, pair]))
        again[2, pair] = before[2, pair]
        np.testing.assert_array_equal(again, before)
        assert mend(store, NEARLY) == 0 and find(store, TOKENS, LAYOUT).num_tokens == BEGIN
        assert mend(store, KV) == 3  # the same keys, the same groups
        assert find(store, TOKENS, LAYOUT) == prefix and verify_store(store).ok


def orders_of(folder: Path, prefix: Prefix) -> np.ndarray:
    with ChunkStore.open(folder) as store:
        return orders(store, prefix)


def test_a_repair_keeps_what_the_next_ingest_makes_whole(folder: Path, prefix: Prefix) -> None:
    segment = prefix.spans[1].segment_id
    assignment(folder, prefix, 1)
    packs(folder, prefix, 1, [HERE + 2])
    with ChunkStore.open(folder) as store:
        report = verify_store(store)
        assert {d.kind for d in report.damages} == {"packs", "assignment"}
        assert planned_repairs(store, report) == [
            f"{segment}: be kept but not served until its text is ingested again"
        ]
        report = verify_store(store, repair=True)
        assert report.unrepaired == [segment] and not (report.removed or report.remade)
        found = inspect_store(store, prefix.id)
        assert found.segments[1].usable_chunks == 0
        assert found.prefix is not None
        assert (found.prefix.bad_packs, found.prefix.lost_orders) == (1, 1)
        assert mend(store) == 2 and verify_store(store).ok
        found = inspect_store(store, prefix.id)
        assert found.prefix is not None and found.segments[1].usable_chunks == 13
        assert (found.prefix.bad_packs, found.prefix.lost_orders) == (0, 0)
