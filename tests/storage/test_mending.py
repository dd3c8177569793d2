"""What is bad is written anew, and nothing else: packs, digests of what is stored again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from segment_support import failing, find, hurt, segment_folder, write

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    Prefix,
    SegmentDamaged,
    StoreError,
    StoreFull,
    StoreUnavailable,
    verify_store,
)
from ckv_jax.storage.layout import LANDMARKS
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.segment.segment import Segment
from ckv_jax.storage.writing import Writers
from tests.faults.tally import LAYOUT, Served, read_prefix
from tests.support.truth import SMALL, digest_keys, ingest, kv_of, read_all, some_tokens

WIDE = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32", "probe": "none"}


def hurt_and_notice(folder: Path, store: ChunkStore, prefix: Prefix, chunks: list[int]) -> None:
    shard = sorted(segment_folder(folder, prefix).glob("packs/c.1.*"))[0]
    for chunk in chunks:
        hurt(shard, chunk * prefix.layout.group_bytes(1) + 5)
    assert read_all(store, prefix).refused == len(chunks)


SHORT = Layout(num_layers=7, num_kv_heads=2, head_dim=8, short_last=True, probe="keys")
APART = Layout(
    num_layers=5, num_kv_heads=3, head_dim=32, pack_layers=2, heads_apart=True, probe="none",
    digest="means",
)  # fmt: skip


@pytest.mark.parametrize(
    "layout", [SMALL, LAYOUT, SHORT, APART], ids=["buffered", "direct", "short", "one head's"]
)
def test_one_bad_chunk_is_replaced_where_it_lies(folder: Path, layout: Layout) -> None:
    tokens = some_tokens(16 * 40 + 5)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens, layout=layout)
        other = ingest(store, some_tokens(64, 1), layout=layout)
        hurt_and_notice(folder, store, prefix, [7, 40])
        usage = store.usage()
        assert find(store, tokens, layout).num_tokens == 7 * 16
        marked = find(store, tokens, layout, marked=True)
        assert marked.num_tokens == len(tokens)
        assert store.marked_chunks(marked).tolist() == [7, 40]
        kv = kv_of(layout, tokens)
        changed = kv.copy()  # computed again, it differs in a bit
        changed.view(layout.disk_dtype)[0, 0, 7 * 16, 0, 0] ^= 1
        assert store.replace_packs(marked, 7, changed[:, :, 7 * 16 : 8 * 16]) == 1
        assert find(store, tokens, layout).num_tokens == 40 * 16  # the other mark is still there
        marked = find(store, tokens, layout, marked=True)
        assert store.marked_chunks(marked).tolist() == [40]
        manifest = segment_folder(folder, prefix) / "manifest.json"
        before = manifest.stat().st_ino
        assert store.replace_packs(marked, 40, kv[:, :, 40 * 16 :]) == 1
        assert manifest.stat().st_ino == before  # the same bits need no new one
        found = find(store, tokens, layout)
        assert found.num_tokens == len(tokens) and len(found.spans) == 1
        assert read_prefix(store, found).wrong == 0 and read_all(store, found).refused == 0
        assert abs(store.usage() - usage) < 100 and verify_store(store).ok
        assert read_all(store, other).refused == 0
    with ChunkStore.open(folder) as store:
        assert find(store, tokens, layout).num_tokens == len(tokens)


def test_what_was_good_keeps_its_bits(folder: Path) -> None:
    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens)
        hurt_and_notice(folder, store, prefix, [3])
        marked = find(store, tokens, SMALL, marked=True)
        lies = np.zeros_like(kv_of(SMALL, tokens[48:64]))
        for bad in (lies[:, :1], lies[:3], lies.astype(np.float32)):
            with pytest.raises(ValueError, match="kv: got"):
                store.replace_packs(marked, 3, bad)
        assert store.replace_packs(marked, 3, lies) == 1  # of the two packs of the chunk
        found = find(store, tokens, SMALL)
        with store.reader(found) as reader:
            out = np.empty((1, *SMALL.pack_shape), SMALL.numpy_dtype)
            for group, blank in ((0, False), (1, True)):
                assert reader.read_packs(group, np.array([3]), out).all()
                assert (not out.view(np.uint16).any()) == blank
        assert store.replace_packs(found, 2, lies) == 0  # nothing of it is bad


def test_a_repair_undoes_none_that_was_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(128)
    kv = kv_of(SMALL, tokens)
    with ChunkStore.open(folder) as store, ChunkStore.open(folder) as other:
        prefix = ingest(store, tokens)
        hurt_and_notice(folder, store, prefix, [3, 5])
        marked, again = (find(one, tokens, SMALL, marked=True) for one in (store, other))
        real = store.files.repairing

        def slow(segment_id: str) -> object:
            assert other.replace_packs(again, 3, np.zeros_like(kv[:, :, 48:64])) == 1
            return real(segment_id)

        monkeypatch.setattr(store.files, "repairing", slow)
        with pytest.raises(SegmentDamaged, match="replaced"):
            store.replace_packs(marked, 5, kv[:, :, 80:96])
        monkeypatch.undo()
        marked = find(store, tokens, SMALL, marked=True)
        assert store.marked_chunks(marked).tolist() == [5]
        assert store.replace_packs(marked, 5, kv[:, :, 80:96]) == 1
        assert find(store, tokens, SMALL).num_tokens == 128


@pytest.mark.parametrize("damage", ["missing", "cut", "longer", "probe"])
def test_lost_shards_and_probes_are_made_anew(folder: Path, damage: str) -> None:
    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens, layout=LAYOUT)
    shard = sorted(segment_folder(folder, prefix).glob("packs/c.0.*"))[0]
    if damage == "missing":
        shard.unlink()
    elif damage == "probe":
        for path in segment_folder(folder, prefix).glob("probe/c.*"):
            hurt(path, 3)
    else:
        os.truncate(shard, 100 if damage == "cut" else shard.stat().st_size + 4096)
    with ChunkStore.open(folder) as store:
        marked = find(store, tokens, LAYOUT, marked=True)
        assert store.replace_packs(marked, 0, kv_of(LAYOUT, tokens)) > 0
        found = find(store, tokens, LAYOUT)
        assert read_prefix(store, found).whole and verify_store(store).ok


@pytest.mark.parametrize("name", ["pwrite", "fsync", "rename", "open"])
def test_a_mending_that_fails_anywhere_leaves_what_was_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tokens = some_tokens(128)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens)
        hurt_and_notice(folder, store, prefix, [3, 5])
        for k in range(1, 60):
            marked = find(store, tokens, SMALL, marked=True)
            with (
                failing(monkeypatch, name, errno.EIO, lambda n, *_, k=k: n == k) as calls,
                contextlib.suppress(StoreError),
            ):
                changed = kv_of(SMALL, tokens[48:64], 48).copy()
                changed.view(np.uint16)[...] ^= k
                store.replace_packs(marked, 3, changed)
            found = find(store, tokens, SMALL, marked=True)
            with store.reader(found) as reader:
                out = np.empty((8, *SMALL.pack_shape), SMALL.numpy_dtype)
                for group in range(SMALL.groups):
                    good = reader.read_packs(group, np.arange(8), out)
                    assert good[[0, 1, 2, 4, 6, 7]].all(), (name, k)
            assert not list((folder / "tmp").iterdir())
            if calls[0] < k:
                break
        assert verify_store(store, repair=True).unread == []


# -- digests -----------------------------------------------------------------------------------


def keys(layout: Layout, tokens: int) -> np.ndarray:
    """KV with means that drift, so that the first block's says little of the next."""
    rng = np.random.default_rng(0)
    shape = (layout.num_layers, 2, tokens, layout.num_kv_heads, layout.head_dim)
    drift = np.linspace(0, 3, tokens)[:, None, None]
    return (rng.normal(size=shape) + drift).astype(layout.numpy_dtype)


@pytest.mark.parametrize(("kind", "error"), [("int4", 0.3), ("pq", 0.8)])
@pytest.mark.parametrize("inherits", [True, False])
def test_a_childs_digest_outlives_its_parents_return(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: float, inherits: bool
) -> None:
    layout = Layout(**WIDE, digest=kind)
    tokens, kv = some_tokens(448), keys(layout, 448)
    with ChunkStore.open(folder) as store:
        parent = write(store, layout, tokens[:320], kv[:, :, :320], block=16)
        child = write(store, layout, tokens[320:], kv[:, :, 320:], parent)
        for shard in segment_folder(folder, parent).glob("packs/c.*"):
            os.truncate(shard, 10)
        assert read_all(store, parent).refused > 0
        if not inherits:  # as where the children cannot be read
            monkeypatch.setattr(Writers, "params_of", lambda *_: None)
        altered = kv[:, :, :320] + np.float32(1e-3)  # computed again, the bits differ
        write(store, layout, tokens[:320], altered, block=320)
        found = find(store, tokens, layout)
        assert [s.segment_id for s in found.spans] == [s.segment_id for s in child.spans]
        with store.reader(found) as reader:
            digest = reader.read_digest()
        assert digest is not None and digest.mixed != inherits
        assert store.stats()["mixed_digests"] == (not inherits)
        assert store.stats()["lost_digests"] == 0
    lost = kv[:, 0] - digest_keys(digest)
    lost -= lost.mean(1, keepdims=True)  # a shift that all keys share does not count
    spread = kv[:, 0] - kv[:, 0].mean(1, keepdims=True)
    assert np.square(lost).mean() ** 0.5 < error * np.square(spread).mean() ** 0.5


def params_of(store: ChunkStore, prefix: Prefix) -> np.ndarray | None:
    """What a segment that continues `prefix` would inherit."""
    span = prefix.spans[-1]
    manifest = store.index.manifest(span.segment_id, span.checksum)
    segment = store.open_segment(manifest, span.checksum)
    try:
        return segment.digest_params()
    finally:
        segment.close()


def mean_keys(layout: Layout, tokens: np.ndarray, first: int) -> np.ndarray:
    """float32 [R, K * D]."""
    keys = kv_of(layout, tokens, first)[list(layout.digest_layers), 0]
    return keys.astype(np.float32).mean(axis=1).reshape(len(keys), -1)


def test_damaged_parameters_are_not_inherited(folder: Path) -> None:
    layout, tokens = dataclasses.replace(LAYOUT, digest_layers=(0, 2)), some_tokens(160)
    with ChunkStore.open(folder) as store:
        root = ingest(store, tokens[:96], layout=layout)
        kept = params_of(store, root)
        np.testing.assert_allclose(kept, mean_keys(layout, tokens[:96], 0), rtol=1e-5)
        (shard,) = segment_folder(folder, root).glob("digest/c.*")
        place = sum(layout.digest_record(96))  # the second row's first byte
        hurt(shard, place)
        assert params_of(store, root) is None
        child = ingest(store, tokens, layout=layout)
        assert child.spans[:1] == root.spans and len(child.spans) == 2
        own = params_of(store, child)
        np.testing.assert_allclose(own, mean_keys(layout, tokens[96:], 96), rtol=1e-5)
        assert read_prefix(store, child) == Served(False, 0)
        hurt(shard, place)  # it is what it was
        # Whole again, but made around two means, which reading takes into account.
        verify_store(store, repair=True)
        assert verify_store(store).ok
        served = read_prefix(store, child)
        assert served.whole and not served.wrong
        for prefix in (root, child):
            with store.reader(prefix) as reader:
                assert reader.read_digest() is not None


def test_a_late_digest_is_a_miss(folder: Path) -> None:
    """The disk that does not answer is a FIFO that nobody writes."""
    layout = Layout(**WIDE, digest="int4")
    with ChunkStore.open(folder) as store:
        prefix = write(store, layout, some_tokens(64), keys(layout, 64))
        with store.reader(prefix, deadline_s=0.3) as reader, store.reader(prefix) as patient:
            (shard,) = segment_folder(folder, prefix).glob("digest/c.*")
            away = shard.rename(folder / "away")
            os.mkfifo(shard)
            assert reader.read_digest() is None
            os.close(os.open(shard, os.O_RDWR))  # lets the abandoned read go
            shard.unlink()
            away.rename(shard)
            assert patient.read_digest() is not None
        assert store.stats()["lost_digests"] == 1 and store.stats()["quarantined"] == 0
        assert find(store, some_tokens(64), layout).num_tokens == 64


# -- probes and digests --------------------------------------------------------------------------


TOKENS = some_tokens(16 * 30 + 5)


def layout_of(kind: str, **more: object) -> Layout:
    return dataclasses.replace(SMALL, head_dim=16, digest=kind, **more)


def digest(store: ChunkStore, prefix: Prefix) -> bytes | None:
    """All that a digest holds."""
    with store.reader(prefix) as reader:
        found = reader.read_digest()
    return None if found is None else b"".join(a.tobytes() for a in found.arrays.values())


@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, part) for kind in ("int4", "pq") for part in ("params", "codes", "file")]
    + [(kind, part) for kind in LANDMARKS for part in ("codes", "file")],
)
def test_a_digest_is_made_anew(folder: Path, kind: str, part: str) -> None:
    layout = layout_of(kind)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=layout, block=64)
        before, usage = digest(store, prefix), store.usage()
        (path,) = segment_folder(folder, prefix).glob("digest/c.*")
        if part == "file":
            path.unlink()
        else:
            record = sum(layout.digest_record(len(TOKENS)))  # one piece here
            place = {"params": 0, "codes": len(layout.digest_layers) * record - 1}
            hurt(path, place[part])
        (damage,) = verify_store(store).damages
        assert damage.what.startswith("digest")
        assert digest(store, prefix) is None and find(store, TOKENS, layout).num_tokens == 0
        marked = find(store, TOKENS, layout, marked=True)
        assert store.rebuild_probes(marked) == (1 if part == "codes" else 4)
        again = find(store, TOKENS, layout)
        assert again.num_tokens == len(TOKENS) and store.usage() == usage
        assert verify_store(store).ok
        if kind == "int4":
            assert read_prefix(store, again) == Served(True, 0)
        if part == "codes" or kind in LANDMARKS:
            assert digest(store, again) == before
        if part == "codes":
            assert again == prefix
        assert store.rebuild_probes(again) == 0


def test_means_of_several_segments_and_of_a_part_of_one(store: ChunkStore) -> None:
    layout, count = layout_of("means"), len(TOKENS)
    ingest(store, TOKENS[:80], layout=layout)
    prefix = ingest(store, TOKENS, layout=layout)
    part = find(store, TOKENS[:100], layout)
    assert len(prefix.spans) == len(part.spans) == 2 and part.num_tokens == 96
    with store.reader(prefix) as reader, store.reader(part) as shorter:
        found, cut = reader.read_digest(), shorter.read_digest()
    assert found is not None and cut is not None
    starts = np.arange(0, count, 16)
    sizes = np.minimum(16, count - starts).astype(np.float32)
    keys = kv_of(layout, TOKENS)[list(layout.digest_layers), 0].astype(np.float32)
    means = np.add.reduceat(keys, starts, axis=1) / sizes[:, None, None]
    mean, log_size = found.arrays["mean"].astype(np.float32), found.arrays["log_size"]
    np.testing.assert_allclose(mean, means, rtol=2**-8)
    np.testing.assert_allclose(log_size, np.broadcast_to(np.log(sizes)[:, None], log_size.shape))
    for name, array in found.arrays.items():
        np.testing.assert_array_equal(cut.arrays[name], array[:, :6])


@pytest.mark.parametrize("kind", LANDMARKS)
def test_numbers_that_are_none_do_not_spread(store: ChunkStore, kind: str) -> None:
    layout = layout_of(kind, dtype="float16")
    kv = keys(layout, 160)
    kv[0, 0, 3], kv[3, 0, 40] = np.nan, np.inf
    with store.reader(write(store, layout, some_tokens(160), kv)) as reader:
        found = reader.read_digest()
    assert found is not None
    assert all(np.isfinite(array.astype(np.float32)).all() for array in found.arrays.values())


def test_a_repair_gives_up_no_segment_for_its_digest(folder: Path) -> None:
    layout = layout_of("int4")
    with ChunkStore.open(folder) as store:
        parent = ingest(store, TOKENS[:160], layout=layout)
        child = ingest(store, TOKENS, layout=layout)
        lost = ingest(store, some_tokens(64, 9), layout=layout)
        hurt(next(segment_folder(folder, parent).glob("digest/c.*")), 0)
        hurt(next(segment_folder(folder, lost).glob("packs/c.0.*")), 0)
        report = verify_store(store, repair=True)
        assert report.remade == [parent.spans[0].segment_id]
        assert report.removed == [lost.spans[0].segment_id]
        assert find(store, TOKENS, layout).num_tokens == child.num_tokens == len(TOKENS)
        assert verify_store(store).ok


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        (LocalFiles, "repairing", StoreUnavailable("another process is repairing it")),
        (LocalFiles, "overwrite", StoreFull("no room on the disk")),
        (Segment, "whole", StoreUnavailable("no answer")),
    ],
)
def test_what_could_not_be_mended_just_now_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: type, name: str, error: StoreError
) -> None:
    """And so does what continues it: no pack of either is bad."""
    layout = layout_of("int4")
    with ChunkStore.open(folder) as store:
        parent = ingest(store, TOKENS[:160], layout=layout)
        child = ingest(store, TOKENS, layout=layout)
        lost = ingest(store, some_tokens(64, 9), layout=layout)
        hurt(next(segment_folder(folder, parent).glob("digest/c.*")), 0)
        hurt(next(segment_folder(folder, lost).glob("packs/c.0.*")), 0)
        with monkeypatch.context() as patch:
            patch.setattr(where, name, Mock(side_effect=error))
            report = verify_store(store, repair=True)
        id_ = parent.spans[0].segment_id
        assert report.unrepaired == report.quarantined == [id_] and not report.remade
        assert report.removed == [lost.spans[0].segment_id]
        assert find(store, TOKENS, layout).num_tokens == 0
        verify_store(store, repair=True)
        assert find(store, TOKENS, layout).num_tokens == child.num_tokens == len(TOKENS)
        report = verify_store(store)
        assert report.ok and not report.unrepaired


@pytest.mark.parametrize("together", [True, False])
def test_probes_are_made_anew_with_a_digest_whose_packs_are_bad(
    folder: Path, together: bool
) -> None:
    more: dict[str, object] = {} if together else {"kv_together": False, "pack_layers": 1}
    layout = layout_of("int4", **more)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, TOKENS, layout=layout)
        (probe,) = segment_folder(folder, prefix).glob("probe/c.*")
        for chunk in (2, 7, 30):
            hurt(probe, chunk * 16 * layout.probe_heads * 16 * 2)
        (shard,) = segment_folder(folder, prefix).glob("packs/c.0.*")
        hurt(shard, 7 * layout.pack_bytes)
        hurt(next(segment_folder(folder, prefix).glob("digest/c.*")), 0)
        assert not read_prefix(store, prefix).whole
        # The probe of chunk 7 and the digest need a pack that is bad.
        assert store.rebuild_probes(find(store, TOKENS, layout, marked=True)) == 2
        assert find(store, TOKENS, layout).num_tokens == 0
