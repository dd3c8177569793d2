"""What is written is read back bit for bit, in every layout; blocks of any size, slow writes, and
spans that begin within a segment."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout, Prefix, StoreClosed, verify_store
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.segment import writer as writers
from ckv_jax.storage.segment.arrays import ArrayWriter
from tests.faults.tally import LAYOUT as PAGES
from tests.faults.tally import Served, read_prefix
from tests.support.truth import (
    FINGERPRINT,
    SMALL,
    ingest,
    kv_of,
    packs_of,
    read_all,
    read_probe,
    some_tokens,
)

SHAPE = {"num_layers": 6, "num_kv_heads": 4, "head_dim": 16}
LAYOUTS = {
    "packs of 4, the last filled up": Layout(**SHAPE, probe="keys"),
    "packs of 4, the last of 3": Layout(
        num_layers=7, num_kv_heads=2, head_dim=8, digest="pq", short_last=True, probe="keys"
    ),
    "packs of 2": Layout(**SHAPE, pack_layers=2, digest="int4", probe="keys"),
    "per layer, probe heads": Layout(**SHAPE, pack_layers=1, probe="heads"),
    "odd layers, per layer": Layout(
        num_layers=5, num_kv_heads=2, head_dim=8, pack_layers=1, probe="keys"
    ),
    "K and V apart, 64 tokens": Layout(
        **SHAPE, pack_layers=1, kv_together=False, chunk_tokens=64, probe="none"
    ),
    "K and V apart, all probes": Layout(
        **SHAPE, pack_layers=1, kv_together=False, chunk_tokens=64, digest="pq", probe="keys"
    ),
    "float32": Layout(**SHAPE, dtype="float32", digest="int4", probe="keys"),
    "float16": Layout(**SHAPE, dtype="float16", probe="keys"),
    "heads apart": Layout(**SHAPE, pack_layers=1, heads_apart=True, digest="means", probe="keys"),
    "heads apart, cosines": Layout(
        **SHAPE, pack_layers=1, heads_apart=True, digest="means+cosines", probe="keys"
    ),
    "heads apart, packs of 4, probe heads": Layout(
        **SHAPE, heads_apart=True, probe="heads", digest="pq"
    ),
    "one KV head": Layout(num_layers=2, num_kv_heads=1, head_dim=8, probe="heads"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("lengths", [(5,), (64, 85), (64, 128, 64, 3)], ids=str)
def test_packs_come_back_bit_for_bit(
    folder: object, layout: Layout, lengths: tuple[int, ...]
) -> None:
    tokens = some_tokens(sum(lengths))
    with ChunkStore.open(folder) as store:
        for end in np.cumsum(lengths):
            ingest(store, tokens[:end], layout=layout, block=layout.chunk_tokens * 3)
    with ChunkStore.open(folder) as store:  # as another process would
        prompt = np.concatenate([tokens, some_tokens(50, seed=9)])
        found = find(store, prompt, layout)
        assert found.num_tokens == len(tokens)
        outcome = read_all(store, found)
        assert (outcome.refused, outcome.wrong) == (0, 0)
        assert outcome.right == layout.groups * found.num_chunks
        assert store.stats()["bad_packs"] == 0


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("layout", [LAYOUTS["heads apart"], LAYOUTS["packs of 2"]], ids=str)
def test_one_read_brings_packs_of_several_layer_groups(
    folder: object, layout: Layout, direct: bool
) -> None:
    """Of several segments and shard files, in any order."""
    tokens = some_tokens(213)
    with ChunkStore.open(folder, config=StoreConfig(direct_io=direct)) as store:
        for end in (48, 160, 213):
            prefix = ingest(store, tokens[:end], layout=layout)
        places = np.stack(np.unravel_index(
            np.random.default_rng(3).permutation(layout.groups * prefix.num_chunks),
            (layout.groups, prefix.num_chunks),
        ))  # fmt: skip
        groups, ids = places
        rows = np.random.default_rng(4).permutation(len(ids) + 9)[: len(ids)]
        out = np.ones((len(ids) + 9, *layout.pack_shape), layout.numpy_dtype)
        with store.reader(prefix) as reader:
            assert reader.read_packs(groups, ids, out, rows=rows).all()
            with pytest.raises(ValueError, match="group"):
                reader.read_packs(np.array([0, layout.groups]), ids[:2], out[:2])
    truth = np.stack([packs_of(layout, tokens, g, np.arange(213)) for g in range(layout.groups)])
    bits = out.view(layout.disk_dtype)
    np.testing.assert_array_equal(bits[rows], truth[groups, ids].view(layout.disk_dtype))
    assert (out[np.setdiff1d(np.arange(len(out)), rows)] == 1).all()


def test_a_reordered_segment_keeps_its_mapping(store: ChunkStore) -> None:
    layout = Layout(
        **SHAPE, pack_layers=1, kv_together=False, chunk_tokens=64, reordered=True, probe="keys"
    )
    tokens = some_tokens(192 + 164)
    rng = np.random.default_rng(3)

    def order(size: int) -> np.ndarray:
        return np.stack([rng.permutation(size) for _ in range(layout.num_layers)])

    ingest(store, tokens[:192], layout=layout, order=order(192))
    prefix = ingest(store, tokens, layout=layout, order=order(164))
    outcome = read_all(store, prefix)
    assert (outcome.refused, outcome.wrong) == (0, 0)
    with store.reader(prefix) as reader:
        assert (np.sort(reader.order) == np.arange(356)).all()
        assert (reader.order != np.arange(356)).any(axis=1).all()
        assert (reader.order[0] != reader.order[1]).any()
    for asked, held in ((356, 356), (300, 192), (150, 0)):  # the second one is only used whole
        assert find(store, tokens[:asked], layout).num_tokens == held


def test_blocks_may_be_reused_by_the_caller(store: ChunkStore) -> None:
    tokens = some_tokens(64)
    kv = kv_of(SMALL, tokens)
    block = np.empty_like(kv[:, :, :16])
    with store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer:
        for start in range(0, 64, 16):
            block[...] = kv[:, :, start : start + 16]
            writer.write(start, block)
            block[...] = 0
        prefix = writer.commit()
    assert read_all(store, prefix).right == SMALL.groups * 4


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_being_written_is_read_back(store: ChunkStore, layout: Layout) -> None:
    """Whole packs, or single layers of them, across blocks."""
    tokens = some_tokens(layout.chunk_tokens * 7 + 5)
    kv, size = kv_of(layout, tokens), layout.chunk_tokens * 3
    with store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens) as writer:
        for start in range(0, len(tokens), size):
            writer.write(start, kv[:, :, start : start + size])
        for group in range(layout.groups):
            truth = packs_of(layout, tokens, group, np.arange(len(tokens)))[2:8]
            whole = np.empty((6, *layout.pack_shape), layout.numpy_dtype)
            writer.read_back(group, 2, whole)
            np.testing.assert_array_equal(whole.view(np.uint8), truth.view(np.uint8))
            for layer in range(layout.disk_layers(group)):
                one = np.empty((6, 1, *layout.pack_shape[1:]), layout.numpy_dtype)
                writer.read_back(group, 2, one, layer=layer)
                same = np.ascontiguousarray(truth[:, layer : layer + 1])
                np.testing.assert_array_equal(one.view(np.uint8), same.view(np.uint8))
        with pytest.raises(ValueError, match="written"):
            writer.read_back(0, 7, np.empty((2, *layout.pack_shape), layout.numpy_dtype))


def test_bad_input_is_refused(store: ChunkStore) -> None:
    tokens = some_tokens(40)
    prefix = ingest(store, tokens)
    kv = kv_of(SMALL, tokens)
    common = {"fingerprint": FINGERPRINT, "layout": SMALL}
    with pytest.raises(ValueError, match="whole chunks"):
        store.writer(**common, tokens=tokens, parent=prefix)
    with pytest.raises(ValueError, match="at least one"):
        store.writer(**common, tokens=tokens[:0])
    with pytest.raises(ValueError, match="order"):
        store.writer(**common, tokens=tokens, order=np.arange(40))
    with store.writer(**common, tokens=tokens) as writer:
        shapes = (kv[:2], kv[:, :1], kv[..., :1, :], kv[..., :7], kv[0], kv[:, :, :0])
        for bad in (*shapes, kv.astype(np.float32)):
            with pytest.raises(ValueError, match="kv: got"):
                writer.write(0, bad)
        with pytest.raises(ValueError, match="in order"):
            writer.write(16, kv[:, :, 16:])
        writer.write(0, kv[:, :, :16])
        with pytest.raises(ValueError, match="expected all 40"):
            writer.commit()
    with pytest.raises(StoreClosed):
        writer.write(16, kv[:, :, 16:])
    with store.reader(prefix) as reader:
        out = np.empty((1, *SMALL.pack_shape), SMALL.numpy_dtype)
        for group, ids in ((0, [3]), (0, [-1]), (2, [0])):
            with pytest.raises(ValueError, match="expected"):
                reader.read_packs(group, np.array(ids), out)
        with pytest.raises(ValueError, match="out: got"):
            reader.read_packs(0, np.array([0, 1]), out)
        with pytest.raises(ValueError, match="layer: got"):
            read_probe(reader, 1, out)
    with pytest.raises(StoreClosed):
        reader.read_packs(0, np.array([0]), out)


# -- the writer ----------------------------------------------------------------------------------


SECONDS = 20.0
APART = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "pack_layers": 1, "heads_apart": True}


@pytest.mark.parametrize(
    "layout",
    [
        SMALL,
        Layout(num_layers=3, num_kv_heads=2, head_dim=8, digest="bounds", probe="heads"),
        Layout(**APART, probe="none", grouping="alike", digest="means"),
    ],
    ids=["probe", "digest", "alike, digest"],
)
def test_how_much_is_written_at_once_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    tokens = some_tokens(16 * 9 + 5)
    kv, found = kv_of(layout, tokens), []
    for chunks in (1, 4, 100):
        monkeypatch.setattr(writers, "_BLOCK_BYTES", chunks * layout.groups * layout.pack_bytes)
        folder = tmp_path / str(chunks)
        with (
            ChunkStore.open(folder) as store,
            store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens) as writer,
        ):
            writer.write(0, kv[:, :, : 16 * 3])
            writer.write(16 * 3, kv[:, :, 16 * 3 :])
            segment = segment_folder(folder, writer.commit())
        files = [path for path in segment.rglob("c.*") if path.is_file()]
        manifest = json.loads((segment / "manifest.json").read_bytes())["body"]
        data = {str(path.relative_to(segment)): path.read_bytes() for path in files}
        found.append((data, manifest | {"created": 0}))
    assert found[0] == found[1] == found[2]


def test_of_two_writers_of_one_prefix_the_second_uses_what_the_first_published(
    folder: Path,
) -> None:
    tokens = some_tokens(64)
    asked = {"fingerprint": FINGERPRINT, "layout": SMALL, "tokens": tokens}
    with (
        ChunkStore.open(folder) as store,
        store.writer(**asked) as one,
        store.writer(**asked) as other,
    ):
        one.write(0, kv_of(SMALL, tokens))
        changed = kv_of(SMALL, tokens).copy()  # computed again, it differs in a bit
        changed.view(SMALL.disk_dtype)[0, 0, 0, 0, 0] ^= 1
        other.write(0, changed)
        first = one.commit()
        assert other.commit() == first
        assert read_all(store, first).right == SMALL.groups * 4
        assert not list((folder / "tmp").iterdir())


def test_a_slow_write_keeps_its_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pack is written last: were its memory given to a later block, that would land."""
    ahead = writers._BLOCKS_AHEAD
    monkeypatch.setattr(writers, "_BLOCK_BYTES", 1)  # a block for each chunk
    tokens = some_tokens(16 * 4 * ahead)
    kv = kv_of(SMALL, tokens)
    others = threading.Semaphore(0)
    real, lock, puts = ArrayWriter.put, threading.Lock(), []

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> Any:
        with lock:
            puts.append(entry)
            first = len(puts) == 1
        if first:  # until as many others as can be written without this block's memory have been
            for _ in range((ahead - 1) * SMALL.groups):
                assert others.acquire(timeout=SECONDS)
        real(self, entry, data, offset)
        if not first:
            others.release()

    monkeypatch.setattr(ArrayWriter, "put", put)
    with (
        ChunkStore.open(folder) as store,
        store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer,
    ):
        for start in range(0, len(tokens), 64):
            writer.write(start, kv[:, :, start : start + 64])
        prefix = writer.commit()
        outcome = read_all(store, prefix)
    assert (outcome.wrong, outcome.refused) == (0, 0)
    assert outcome.right == SMALL.groups * prefix.num_chunks


def test_a_writer_that_is_left_waits_for_its_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread may write into memory or a folder that its writer has given up."""
    running, go, ended = threading.Event(), threading.Event(), list[int]()
    real = ArrayWriter.put

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> None:
        running.set()
        assert go.wait(SECONDS)
        real(self, entry, data, offset)
        ended.append(entry)

    monkeypatch.setattr(ArrayWriter, "put", put)
    tokens = some_tokens(32)
    with ChunkStore.open(folder) as store:
        writer = store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens)
        writer.write(0, kv_of(SMALL, tokens))
        assert running.wait(SECONDS)
        threading.Timer(0.05, go.set).start()
        writer.close()
        count = len(ended)
        assert count >= SMALL.groups
        assert not list((folder / "tmp").iterdir()) and store.usage() == 0
    assert len(ended) == count


# -- spans that begin within a segment -----------------------------------------------------------


SPANNED = some_tokens(200)
BEGIN = 8
"""Chunk from which on the second segment serves; it starts at chunk 5."""


def two_segments(store: ChunkStore, folder: Path) -> Prefix:
    """Chunks 0 to 7 and chunks 5 to 12: what was bad was stored again, and then turned out good."""
    first = ingest(store, SPANNED[:128], layout=PAGES)
    id_, checksum = first.spans[0].segment_id, first.spans[0].checksum
    store.index.quarantine(id_, checksum, 5, "looked bad")
    second = ingest(store, SPANNED, layout=PAGES)
    assert [span.num_chunks for span in second.spans] == [5, 8]
    assert verify_store(store, repair=True).pardoned == [id_]
    found = find(store, SPANNED, PAGES)
    assert [(s.first_chunk, s.num_chunks) for s in found.spans] == [(0, BEGIN), (3, 5)]
    assert found.num_tokens == len(SPANNED) and found.id == second.id
    return found


def damage(folder: Path, prefix: Prefix, chunk: int, layer: int = 0) -> None:
    """Flips a bit of a chunk's keys in the probe of the second segment, where it is chunk - 5."""
    (path,) = segment_folder(folder, prefix, 1).glob("probe/c.*")
    row = PAGES.probe_heads * PAGES.head_dim * PAGES.disk_dtype.itemsize
    rows = len(PAGES.probe_layers)
    padded = (path.stat().st_size - 4 - 16 * rows) // rows // row
    at = PAGES.probe_layers.index(layer) * padded + (chunk - 5) * PAGES.chunk_tokens
    hurt(path, at * row)


def test_packs_probes_and_digest_of_such_a_prefix_are_right(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = two_segments(store, folder)
        assert read_all(store, prefix).right == PAGES.groups * prefix.num_chunks
        assert read_prefix(store, prefix) == Served(True, 0)


@pytest.mark.parametrize(("chunk", "good"), [(12, 12), (BEGIN, BEGIN)])
def test_a_probe_is_good_up_to_the_first_bad_chunk(folder: Path, chunk: int, good: int) -> None:
    layer = PAGES.probe_layers[-1]
    with ChunkStore.open(folder) as store:
        prefix = two_segments(store, folder)
        damage(folder, prefix, chunk, layer)
        keys = kv_of(PAGES, SPANNED)[:, 0]
        out = np.ones((len(SPANNED), PAGES.probe_heads, PAGES.head_dim), PAGES.numpy_dtype)
        with store.reader(prefix) as reader:
            assert read_probe(reader, layer, out) == good * PAGES.chunk_tokens
            right = good * PAGES.chunk_tokens
            np.testing.assert_array_equal(
                out[:right].view(np.uint16), np.ascontiguousarray(keys[layer, :right]).view("u2")
            )
            assert not out[right:].view(np.uint16).any()
            for other in PAGES.probe_layers[:-1]:
                assert read_probe(reader, other, out) == len(SPANNED)
        span = prefix.spans[1]
        quarantined = store.index.catalog.quarantined(span.segment_id, span.checksum)
        assert quarantined
        found = find(store, SPANNED, PAGES)
        assert found.num_tokens == max(good, BEGIN) * PAGES.chunk_tokens
