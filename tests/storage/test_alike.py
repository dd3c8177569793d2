"""Chunks of alike tokens: which token is in which, what is kept of that, what is lost with it."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import zarr
from segment_support import ALIKE, find, hurt, segment_folder
from segment_support import ALIKE as LAYOUT

from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.storage import (
    ChunkStore,
    Layout,
    Prefix,
    SegmentDamaged,
    chain,
    pin_prefix,
    verify_store,
)
from ckv_jax.storage import (
    layout as layouts,
)
from ckv_jax.storage.errors import PrefixNotFound
from ckv_jax.storage.layout import RUN
from ckv_jax.storage.segment.alike import alike
from tests.support.truth import FINGERPRINT, ingest, kv_of, read_all, some_tokens

REORDERED = Layout(num_layers=2, num_kv_heads=2, head_dim=32, probe="none", reordered=True)
TOKENS = some_tokens(16 * 23 + 5)


@pytest.mark.parametrize("dim", [8, 64])
def test_kinds_that_lie_far_apart_come_apart(dim: int) -> None:
    """By fewer keys than dims and by more: two kinds, each in a half of the units."""
    rng = np.random.default_rng(dim)
    kind = np.repeat(rng.permutation(np.repeat([0, 1], 8)), 4)
    keys = rng.normal(size=(64, dim)) + 50 * kind[:, None] * rng.normal(size=dim)
    unit = alike(keys.astype(np.float32), 16)
    assert all(len(set(kind[unit == each])) == 1 for each in range(4))


@pytest.mark.parametrize("count", [RUN // 16 * 2 * 16 + 400, 16 * 23 + 5, 16 * 5 + 3, 7])
def test_what_is_stored_is_every_token_once(store: ChunkStore, count: int) -> None:
    tokens = some_tokens(count)
    prefix = ingest(store, tokens, layout=LAYOUT)
    assert read_all(store, prefix).right == LAYOUT.groups * prefix.num_chunks
    with store.reader(prefix) as reader:
        order = reader.order
    assert order.shape == (4, count)
    for start in range(0, count, RUN):
        part = order[:, start : start + RUN]
        np.testing.assert_array_equal(np.sort(part), np.tile(np.sort(part[0]), (4, 1)))
        assert part.min() == start and part.max() == min(start + RUN, count) - 1
    steady = np.r_[0 : min(16, count), max(0, (count - 64) // 16 * 16) : count]
    np.testing.assert_array_equal(order[:, steady], np.tile(steady, (4, 1)))
    if count > 200:  # heads and layers have groups of their own
        assert len({row.tobytes() for row in order}) == 4
        chunks = order[:, 16 : count // 16 * 16].reshape(4, -1, 16)
        assert (np.diff(chunks) > 0).mean() > 0.9  # in their order within a chunk, but for runs'


def test_a_landmark_is_the_mean_of_its_chunk_s_keys(store: ChunkStore) -> None:
    prefix = ingest(store, TOKENS, layout=LAYOUT)
    keys = kv_of(LAYOUT, TOKENS)[:, 0].astype(np.float32)
    with store.reader(prefix) as reader:
        found, order = reader.read_digest(), reader.order
    assert found is not None
    for layer, head in np.ndindex(2, 2):
        stored = keys[layer, order[2 * layer + head], head]
        means = stored[: 23 * 16].reshape(23, 16, -1).mean(1)
        mean = found.arrays["mean"][layer][:23, head].astype(np.float32)
        np.testing.assert_allclose(mean, means, rtol=0.01, atol=0.01)


def test_others_read_the_assignment(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
        with store.reader(prefix) as reader:
            order = reader.order
    found = zarr.open_group(segment_folder(folder, prefix), mode="r")["assignment"]
    assert found.shape == (4, len(TOKENS)) and found.dtype == np.uint16
    assert found.attrs["axes"] == ["layer_head", "token"] and found.attrs["run"] == RUN
    np.testing.assert_array_equal(np.argsort(found[:], axis=1, kind="stable"), order)


def test_it_is_used_whole_or_up_to_its_tail(store: ChunkStore) -> None:
    """A chunk of the middle holds tokens of all of it."""
    long = some_tokens(RUN + 320)
    ingest(store, long, layout=LAYOUT)
    assert find(store, long, LAYOUT).num_tokens == len(long)
    assert find(store, long[:-1], LAYOUT).num_tokens == RUN + 304  # in the last 64
    assert find(store, long[:-70], LAYOUT).num_tokens == RUN  # a run is whole
    assert find(store, long[: RUN - 1], LAYOUT).num_tokens == 0
    other = np.concatenate([long[:-3], some_tokens(100, 1)])
    prefix = ingest(store, other, layout=LAYOUT)
    assert [span.num_chunks for span in prefix.spans] == [(RUN + 304) // 16, 8]
    assert read_all(store, prefix).wrong == 0 and find(store, other, LAYOUT) == prefix
    with pytest.raises(SegmentDamaged, match="are grouped"):
        read_kv(store, prefix, first_chunk=3)
    last = prefix.num_chunks - 1
    np.testing.assert_array_equal(
        read_kv(store, prefix, first_chunk=last), kv_of(LAYOUT, other)[:, :, last * 16 :]
    )


def test_what_ends_with_a_part_of_a_chunk_is_found_whole(store: ChunkStore) -> None:
    prefix = ingest(store, TOKENS, layout=LAYOUT)
    found = find(store, np.concatenate([TOKENS, some_tokens(30, 1)]), LAYOUT)
    assert found == find(store, TOKENS, LAYOUT) == prefix and len(found.spans) == 1
    assert read_all(store, found).right == LAYOUT.groups * prefix.num_chunks
    with store.reader(prefix) as written, store.reader(found) as reader:
        np.testing.assert_array_equal(reader.order, written.order)


@pytest.mark.parametrize("layout", [LAYOUT, REORDERED], ids=["alike", "reordered"])
def test_no_id_leads_to_chunks_of_tokens_from_elsewhere(store: ChunkStore, layout: Layout) -> None:
    """A text that was stored once, and a longer one that is stored now: not the same chunks."""
    order = np.roll(np.arange(len(TOKENS)), 40) if layout.reordered else None
    with store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=TOKENS, order=order) as writer:
        writer.write(0, kv_of(layout, TOKENS))
        prefix = writer.commit()
    seed = chain.seed(FINGERPRINT, layout, "")
    links = [link.hex() for link in chain.links(seed, TOKENS, 16)]
    assert links[-1] == prefix.id and store.prefix(prefix.id) == prefix
    for use in (store.prefix, functools.partial(pin_prefix, store)):
        with pytest.raises(PrefixNotFound, match=f"ends inside of {prefix.id}") as error:
            use(links[9])
        assert error.value.close == (prefix.id,)
    assert store.bounds.pinned() == set() and not store.records()
    pin_prefix(store, prefix.id)
    assert store.bounds.pinned() == {prefix.spans[0].segment_id}
    if layout.alike:  # in the last 64
        assert store.prefix(links[-2]).num_tokens == 16 * 23


def test_a_digest_is_made_again_of_grouped_packs(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=LAYOUT)
        (shard,) = segment_folder(folder, prefix).glob("digest/c.*")
        written = shard.read_bytes()
        hurt(shard, 40)
        assert len(verify_store(store, repair=True).remade) == 1
        assert shard.read_bytes() == written and verify_store(store).ok


def test_keys_that_are_not_finite_are_grouped_too(store: ChunkStore) -> None:
    kv = kv_of(LAYOUT, TOKENS)
    kv[0, 0, 40:60, 0, :3] = [np.inf, np.nan, -np.inf]
    with store.writer(fingerprint=FINGERPRINT, layout=LAYOUT, tokens=TOKENS) as writer:
        writer.write(0, kv)
        prefix = writer.commit()
    with store.reader(prefix) as reader:
        order = reader.order
    np.testing.assert_array_equal(np.sort(order), np.tile(np.arange(len(TOKENS)), (4, 1)))


def test_it_is_of_a_version_of_its_own() -> None:
    apart = dataclasses.replace(LAYOUT, grouping="position")
    assert LAYOUT.to_dict()["version"] == 10 and apart.to_dict()["version"] == 9
    assert Layout.from_dict(json.loads(json.dumps(LAYOUT.to_dict()))) == LAYOUT
    assert "grouping" not in apart.to_dict() and LAYOUT.hex != apart.hex


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads_apart": False},
        {"pack_layers": 2},
        {"probe": "keys"},
        {"chunk_tokens": 6},
        {"grouping": "kmeans"},
    ],
    ids=str,
)
def test_what_it_does_not_go_with_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="grouping: got"):
        dataclasses.replace(LAYOUT, **wrong)  # type: ignore[arg-type]


# -- a segment that continues a text -------------------------------------------------------------


BEGIN = 16 * 8
"""Where the second segment begins; of its twelve chunks and a part two runs of four are grouped."""
CONTINUED = some_tokens(BEGIN + 16 * 12 + 5)
KV = kv_of(ALIKE, CONTINUED)
WIDE = KV.astype(np.float32)
NEARLY = (WIDE * np.float32(1 + 2**-7)).astype(KV.dtype)
"""As if computed again in another order: they are grouped as they were."""
OTHER = (WIDE * np.random.default_rng(2).uniform(0.8, 1.2, KV.shape)).astype(KV.dtype)
"""Keys that would be grouped otherwise, and are nearest to what they were."""


@pytest.fixture
def prefix(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> Prefix:
    monkeypatch.setattr(layouts, "RUN", 64)
    ingest(store, CONTINUED[:BEGIN], layout=ALIKE)
    made = ingest(store, CONTINUED, layout=ALIKE)
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
    steady = np.r_[:16, BEGIN + 128 : len(CONTINUED)]
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
            alike(kv[1, 0, start : start + 64, 0].astype(np.float32), 16) for kv in (KV, OTHER)
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
    assert find(store, CONTINUED, ALIKE) == prefix


def lost(folder: Path, prefix: Prefix, bad: list[int]) -> None:
    """Flip a bit in the second segment's assignment of the third group, and in packs of it."""
    segment, tokens = segment_folder(folder, prefix, 1), len(CONTINUED) - BEGIN
    (path,) = segment.glob("assignment/c.*")
    hurt(path, 2 * tokens * 2 + 40)
    shards = sorted(segment.glob("packs/c.*"))
    shard, row = divmod(2, ALIKE.shard_groups)
    for chunk in bad:
        hurt(shards[shard], (row * 13 + chunk) * ALIKE.pack_bytes + 3)
