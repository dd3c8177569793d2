"""Fingerprints by content, caches where they belong, and limits on every header that is read."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from ckv_jax.errors import CheckpointError
from ckv_jax.model import identity
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.safetensors_file import SafetensorsFile
from ckv_jax.storage import ChunkStore, Layout, fingerprint, hash_files
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.segment import manifest
from ckv_jax.storage.segment.manifest import ManifestCache
from ckv_jax.user_cache import cache_folder
from tests.support.truth import FINGERPRINT, SMALL, ingest, read_all, some_tokens


def settle(path: Path) -> None:
    """Wait until the file's last change is old enough to be trusted."""
    while time.time() - path.stat().st_ctime <= fingerprint._SETTLED_S:
        time.sleep(0.1)


def test_a_file_of_equal_size_and_time_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_SETTLED_S", 0.2)
    path, cache = tmp_path / "model.safetensors", tmp_path / "cache.json"
    path.write_bytes(b"a" * 5_000_000)
    os.utime(path, ns=(10**18, 10**18))
    settle(path)
    first = hash_files([path], cache)
    assert cache.exists()
    path.write_bytes(b"b" * 5_000_000)  # in its place
    os.utime(path, ns=(10**18, 10**18))
    settle(path)
    second = hash_files([path], cache)
    assert second != first == hash_files_of(tmp_path, b"a" * 5_000_000)
    other = tmp_path / "other"
    other.write_bytes(b"c" * 5_000_000)  # over it, as `cp -p` and image builds do
    os.utime(other, ns=(10**18, 10**18))
    other.rename(path)
    settle(path)
    assert len({first, second, hash_files([path], cache)}) == 3


def hash_files_of(folder: Path, data: bytes) -> str:
    (folder / "fresh").mkdir()
    path = folder / "fresh" / "model.safetensors"
    path.write_bytes(data)
    return hash_files([path])


def test_a_hash_is_not_computed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_SETTLED_S", 0.1)
    path, cache = tmp_path / "model.safetensors", tmp_path / "cache.json"
    path.write_bytes(b"a" * 20_000_000)
    settle(path)
    first = hash_files([path], cache)
    known = json.loads(cache.read_text())
    (key,) = known
    cache.write_text(json.dumps({key: "0" * 64}))  # to be seen if it is used
    assert hash_files([path], cache) != first
    path.touch()
    settle(path)
    assert hash_files([path], cache) == first


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    path, cache = tmp_path / "model.safetensors", tmp_path / "cache.json"
    path.write_bytes(b"a")
    hash_files([path], cache)
    assert not cache.exists()


def test_the_arithmetic_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
    )

    def made() -> fingerprint.Fingerprint:
        return identity._fingerprint(config, dtype="float32", weights="w", tokenizer="t")

    first = made()
    monkeypatch.setattr(identity, "KV_ARITHMETIC", identity.KV_ARITHMETIC + 1)
    assert first.differences(made()) == ["arithmetic"]


@pytest.mark.parametrize("said", ["", ".", "cache", "./x"])
def test_the_cache_is_never_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", said)
    assert cache_folder() == tmp_path / "home" / ".cache" / "ckv_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "said"))
    assert cache_folder() == tmp_path / "said" / "ckv_jax"


def header(path: Path, text: bytes) -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return path


def test_a_hostile_header_costs_no_more_than_its_length(tmp_path: Path) -> None:
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = b",".join(b'"%d":%s' % (i, entry) for i in range(100_000))
    path = header(tmp_path / "many", b"{" + names + b"}")
    start = time.process_time()
    assert len(SafetensorsFile(path).shapes) == 100_000
    assert time.process_time() - start < 20  # two minutes if each name were looked for in all
    path = header(tmp_path / "twice", b'{"7":' + entry + b',"8":' + entry + b',"7":' + entry + b"}")
    with pytest.raises(CheckpointError, match="duplicate tensor '7'"):
        SafetensorsFile(path)
    more = b",".join(b'"%d":0' % i for i in range(200_001))
    path = header(tmp_path / "more", b"{" + more + b"}")
    with pytest.raises(CheckpointError, match="expected at most 200000"):
        SafetensorsFile(path)
    for text in (b"[" * 50_000, b'{"a":' * 50_000, b'{"a":{"dtype":"F32"}}', b'{"a":1e999}'):
        with pytest.raises(CheckpointError, match="header"):
            SafetensorsFile(header(tmp_path / "bad", text))


def test_a_manifest_that_is_too_large_is_not_read(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        path = next((folder / "segments").glob("*/*/manifest.json"))
        os.truncate(path, manifest.MAX_BYTES + 1)  # a hole
        start = time.monotonic()
        found = store.longest_prefix(prefix.tokens, fingerprint=FINGERPRINT, layout=SMALL)
        assert found.num_tokens == 0 and time.monotonic() - start < 5


def test_what_no_manifest_has_room_for_is_refused_before_it_is_written(folder: Path) -> None:
    """Heads apart have a checksum each: of many, a text is too long that others have room for."""
    apart = Layout(
        num_layers=80, num_kv_heads=64, head_dim=8, chunk_tokens=4, pack_layers=1, probe="none",
        heads_apart=True,
    )  # fmt: skip
    tokens = some_tokens(10_000)
    with ChunkStore.open(folder) as store:
        with pytest.raises(ValueError, match=r"got 10000, .* 5120 packs for each chunk"):
            store.writer(fingerprint=FINGERPRINT, layout=apart, tokens=tokens)
        assert not list((folder / "tmp").iterdir()) and store.usage() == 0
        together = dataclasses.replace(apart, heads_apart=False)
        store.writer(fingerprint=FINGERPRINT, layout=together, tokens=tokens).close()


def test_an_order_that_no_manifest_has_room_for_is_refused(folder: Path) -> None:
    layout = Layout(
        num_layers=80, num_kv_heads=1, head_dim=8, probe="none", reordered=True, layer_orders=True
    )
    tokens = some_tokens(200_000)
    order = np.broadcast_to(np.zeros(1, np.int32), (80, len(tokens)))
    with ChunkStore.open(folder) as store:
        with pytest.raises(ValueError, match=r"got 200000, .* and 80 mapping lists"):
            store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens, order=order)
        assert not list((folder / "tmp").iterdir()) and store.usage() == 0


@pytest.mark.parametrize("apart", [False, True])
def test_a_manifest_is_no_larger_than_was_expected(folder: Path, apart: bool) -> None:
    layout = dataclasses.replace(
        SMALL, pack_layers=1, probe="none", digest="means", heads_apart=apart,
        grouping="alike" if apart else "position",
    )  # fmt: skip
    tokens = some_tokens(30_005)
    with ChunkStore.open(folder) as store:
        ingest(store, tokens, layout=layout)
    [path] = folder.glob("segments/*/*/manifest.json")
    size, most = path.stat().st_size, manifest.most_bytes(layout, len(tokens))
    assert most - (1 << 15) < size <= most


def test_an_index_of_earlier_code_is_taken_over(folder: Path) -> None:
    """Its times of use and scores stay; reservations and what it did not know of are made anew."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64))
        ingest(store, some_tokens(64, 1), salt="tenant")
        store.save_scores(prefix.spans[0].segment_id, [[2.0] * 4] * 2, [[1] * 4] * 2)
    db = sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)
    db.executescript(
        "DROP INDEX segments_tenant; ALTER TABLE segments DROP COLUMN tenant;"
        "UPDATE segments SET used = 5.0;"
        "DROP TABLE reservations; DROP TABLE evictions; PRAGMA user_version = 0;"
        "CREATE TABLE reservations(name TEXT PRIMARY KEY, bytes INTEGER NOT NULL);"
        "INSERT INTO reservations VALUES('ab', 1000000);"
    )
    db.close()
    with ChunkStore.open(folder) as store:
        entries = store.index.catalog.entries()
        assert [e.used for e in entries] == [5.0, 5.0] and {bool(e.tenant) for e in entries} == {
            True,
            False,
        }
        assert store.load_scores(prefix.spans[0].segment_id) is not None
        assert {e.score for e in entries} == {2.0, None}
        assert store.usage() == sum(e.bytes for e in entries)
        assert read_all(store, prefix).refused == 0


def test_manifests_in_memory_are_bounded_and_the_latest_stay(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [ingest(store, some_tokens(64, n)).spans[0].segment_id for n in range(3)]
    reads, read = [], LocalFiles.manifest

    def noted(files: LocalFiles, segment_id: str) -> bytes:
        reads.append(ids.index(segment_id))
        return read(files, segment_id)

    monkeypatch.setattr(manifest, "_CACHE_BYTES", 5 * len(store.files.manifest(ids[0])) // 2)
    monkeypatch.setattr(LocalFiles, "manifest", noted)
    cache = ManifestCache(store.files)
    for which in (0, 1, 0, 2, 0, 1):
        cache.load(ids[which])
    assert reads == [0, 1, 2, 1]
    for _ in range(5):  # what is forgotten leaves its room to others
        cache.forget(ids[0])
        cache.load(ids[0])
    reads.clear()
    cache.load(ids[1])
    assert not reads
