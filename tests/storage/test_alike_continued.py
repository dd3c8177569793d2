"""Alike tokens of a segment that continues a text: grouped from its begin on, and told again."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from segment_support import ALIKE, find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Prefix, grouping
from tests.support.truth import ingest, kv_of, some_tokens

BEGIN = 16 * 8
"""Where the second segment begins; of its twelve chunks and a part two runs of four are grouped."""
TOKENS = some_tokens(BEGIN + 16 * 12 + 5)
KV = kv_of(ALIKE, TOKENS)
WIDE = KV.astype(np.float32)
NEARLY = (WIDE * np.float32(1 + 2**-7)).astype(KV.dtype)
"""As if computed again in another order: they are grouped as they were."""
OTHER = (WIDE * np.random.default_rng(2).uniform(0.8, 1.2, KV.shape)).astype(KV.dtype)
"""Keys that would be grouped otherwise, and are nearest to what they were."""


@pytest.fixture
def prefix(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Prefix:
    monkeypatch.setattr(grouping, "RUN", 64)
    ingest(store, TOKENS[:BEGIN], layout=ALIKE)
    made = ingest(store, TOKENS, layout=ALIKE)
    assert [span.num_chunks for span in made.spans] == [8, 13]
    return made


def test_it_is_grouped_from_its_first_chunk_on(store: ChunkStore, prefix: Prefix) -> None:
    """Only a text's first tokens stay where they are, and its last."""
    with store.reader(prefix) as reader:
        order = reader.order
    for start in (BEGIN, BEGIN + 64):
        run = np.tile(np.arange(start, start + 64), (4, 1))
        np.testing.assert_array_equal(np.sort(order[:, start : start + 64]), run)
        assert (order[:, start : start + 16] != run[:, :16]).any(1).all()
    steady = np.r_[:16, BEGIN + 128 : len(TOKENS)]
    np.testing.assert_array_equal(order[:, steady], np.tile(steady, (4, 1)))


@pytest.mark.parametrize(
    ("kv", "bad"),
    [(KV, [1, 2, 6]), (NEARLY, [1, 2, 6]), (OTHER, [6])],
    ids=["the same keys", "keys in other bits", "keys that are near"],
)
def test_its_lost_assignment_is_told_for_certain(
    store: ChunkStore, folder: Path, prefix: Prefix, caplog: pytest.LogCaptureFixture,
    kv: np.ndarray, bad: list[int],
) -> None:  # fmt: skip
    """By the keys alone, or by those and the packs that are good."""
    with store.reader(prefix) as reader:
        before = reader.order
    lost(folder, prefix, bad)
    with store.reader(prefix) as reader, caplog.at_level(logging.WARNING):
        again = reader.order_by(lambda g, start, end: kv[g // 2, 0, start:end, g % 2])
    np.testing.assert_array_equal(again, before)
    assert not caplog.text


def test_near_keys_alone_would_be_grouped_otherwise() -> None:
    for start in (BEGIN, BEGIN + 64):
        here, other = (
            grouping.alike(kv[1, 0, start : start + 64, 0].astype(np.float32), 16)
            for kv in (KV, OTHER)
        )
        assert (here != other).any()


def test_its_lost_assignment_and_packs_are_written_as_they_were(
    store: ChunkStore, folder: Path, prefix: Prefix
) -> None:
    files = [path for path in segment_folder(folder, prefix, 1).rglob("c.*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    lost(folder, prefix, [1, 2, 6, 12])
    assert [path.read_bytes() for path in files] != before
    assert store.replace_packs(prefix, BEGIN // 16, KV[:, :, BEGIN:]) == 5
    assert [path.read_bytes() for path in files] == before
    assert find(store, TOKENS, ALIKE) == prefix


def lost(folder: Path, prefix: Prefix, bad: list[int]) -> None:
    """Flip a bit in the second segment's assignment of the third group, and in packs of it."""
    segment, tokens = segment_folder(folder, prefix, 1), len(TOKENS) - BEGIN
    (path,) = segment.glob("assignment/c.*")
    hurt(path, 2 * tokens * 2 + 40)
    shards = sorted(segment.glob("packs/c.*"))
    shard, row = divmod(2, ALIKE.shard_groups)
    for chunk in bad:
        hurt(shards[shard], (row * 13 + chunk) * ALIKE.pack_bytes + 3)
