"""An encrypted store: what is read is what was written, and what is on disk says nothing of it."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from segment_support import ALIKE, find, hurt, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    Prefix,
    PrefixRecord,
    StoreConfig,
    WrongKey,
    inspect_store,
    prune_store,
    verify_store,
)
from ckv_jax.storage.encryption import StoreKey
from ckv_jax.storage.place import marker
from ckv_jax.storage.place.objects import ObjectFiles
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.seal import SEALED
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

PAGES = Layout(
    num_layers=4, num_kv_heads=2, head_dim=64, pack_layers=2, digest="int4", probe="keys"
)
LAYOUTS = {
    "probe": SMALL,
    "read directly": PAGES,
    "pq": dataclasses.replace(PAGES, digest="pq", pack_layers=1, kv_together=False),
    "alike": ALIKE,
    "in an own order": dataclasses.replace(PAGES, probe="none", reordered=True),
    "short": Layout(num_layers=7, num_kv_heads=2, head_dim=64, short_last=True, probe="keys"),
}
TOKENS = some_tokens(16 * 23 + 5)
NAME = "the name of a secret"


def key_file(folder: Path, seed: int = 0) -> Path:
    """A file with a key of its own for every seed."""
    path = folder / f"key-{seed}"
    path.write_text(np.random.default_rng(seed).bytes(32).hex() + "\n")
    return path


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(encrypt_key_file=key_file(tmp_path))


def bytes_in(folder: Path) -> bytes:
    """All names and bytes of a folder."""
    paths = sorted(folder.rglob("*"))
    return b"".join(str(p).encode() + (p.read_bytes() if p.is_file() else b"") for p in paths)


def secrets_of(prefix: Prefix) -> Iterator[bytes]:
    """What must not be found in the store's folder."""
    layout = prefix.layout
    kv = kv_of(layout, prefix.tokens).view(layout.disk_dtype)
    for start in range(0, prefix.num_tokens - 4, 4):
        yield prefix.tokens[start : start + 4].astype("<i4").tobytes()
    for layer in kv:
        for row in layer.reshape(-1, layout.head_dim)[::13]:
            yield row.tobytes()
    yield base64.b64encode(prefix.tokens[:48].astype("<i4").tobytes())
    yield NAME.encode()
    yield np.random.default_rng(0).bytes(32)  # the key


@pytest.mark.parametrize(
    ("layout", "direct"),
    [*((layout, None) for layout in LAYOUTS.values()), (PAGES, False)],
    ids=[*LAYOUTS, "through the cache"],
)
def test_what_is_read_is_what_was_written(
    folder: Path, config: StoreConfig, layout: Layout, direct: bool | None
) -> None:
    """Packs, probes, digests, orders as in clear; nothing of them, of tokens or names on disk."""
    plain, config = folder.with_name("plain"), dataclasses.replace(config, direct_io=direct)
    with ChunkStore.open(plain) as clear, ChunkStore.open(folder, config=config) as store:
        for tokens, new in ((TOKENS[: 16 * 9], 16 * 9), (TOKENS, len(TOKENS) - 16 * 9)):
            order = np.roll(np.arange(new), 40) if layout.reordered else None
            prefix, same = (
                ingest(each, tokens, layout=layout, order=order) for each in (store, clear)
            )
        assert len(prefix.spans) == 2 and prefix.id == same.id
        store.set_record(prefix.id, PrefixRecord(name=NAME, begins=NAME))
        clear.set_record(prefix.id, PrefixRecord(name=NAME, begins=NAME))
    with ChunkStore.open(folder, config=config) as store, ChunkStore.open(plain) as clear:
        prefix = find(store, TOKENS, layout)
        assert prefix.num_tokens == len(TOKENS)
        assert read_all(store, prefix).right == layout.groups * prefix.num_chunks
        assert store.record_of(prefix).name == NAME
        assert inspect_store(store, NAME).prefix is not None
        with store.reader(prefix) as reader, clear.reader(same) as other:
            np.testing.assert_array_equal(reader.order, other.order)
            shape = (len(TOKENS), layout.probe_heads, layout.head_dim)
            for layer in layout.probe_layers:
                keys, truth = (np.zeros(shape, layout.numpy_dtype) for _ in range(2))
                assert read_probe(reader, layer, keys) == read_probe(other, layer, truth)
                assert keys.tobytes() == truth.tobytes()
            if layout.digest != "none":
                digest, truth = reader.read_digest(), other.read_digest()
                assert digest is not None and truth is not None
                for name, array in truth.arrays.items():
                    np.testing.assert_array_equal(digest.arrays[name], array)
        report = verify_store(store)
        assert report.ok and report.segments == 2 and not store.stats()["bad_packs"]
        sizes = {id_: size for id_, (size, _) in store.sizes().items()}
        for id_, size in sizes.items():
            files = (folder / "segments" / id_[:2] / id_).rglob("*")
            assert size == sum(file.stat().st_size for file in files if file.is_file())
    raw, clear_raw = bytes_in(folder), bytes_in(plain)
    for secret in secrets_of(prefix):
        assert secret not in raw
    found = [secret for secret in secrets_of(prefix) if secret in clear_raw]
    assert len(found) > 20 and NAME.encode() in found  # so that this test can fail
    assert base64.b64encode(TOKENS[:48].tobytes()) in found


def test_what_is_being_written_is_read_back(folder: Path, config: StoreConfig) -> None:
    kv, shape = kv_of(PAGES, TOKENS), PAGES.pack_shape
    truth = packs_of(PAGES, TOKENS, 1, np.arange(len(TOKENS)))[2:8]
    with (
        ChunkStore.open(folder, config=config) as store,
        store.writer(fingerprint=FINGERPRINT, layout=PAGES, tokens=TOKENS) as writer,
    ):
        writer.write(0, kv)
        for out in (np.empty((6, *shape), kv.dtype), np.empty((6, 1, *shape[1:]), kv.dtype)):
            writer.read_back(1, 2, out, layer=0 if out.shape[1] == 2 else 1)
            assert out.tobytes() == truth[:, -out.shape[1] :].tobytes()


# -- keys ------------------------------------------------------------------------------------------


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    yield
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("readonly", [False, True])
def test_a_key_too_many_too_few_or_another_is_refused(
    folder: Path, config: StoreConfig, tmp_path: Path, readonly: bool
) -> None:
    other = StoreConfig(encrypt_key_file=key_file(tmp_path, 1))
    plain = tmp_path / "plain"
    with ChunkStore.open(folder, config=config) as store, ChunkStore.open(plain) as clear:
        ingest(store, TOKENS)
        ingest(clear, TOKENS)
    for where, given, said in (
        (folder, None, "not readable without --encrypt-key-file"),
        (folder, other, "with another key than that in --encrypt-key-file"),
        (plain, config, r"not encrypted: leave --encrypt-key-file \(CKV_ENCRYPT_KEY_FILE\) out"),
    ):
        with unchanged(where), pytest.raises(WrongKey, match=said) as error:
            ChunkStore.open(where, config=given, readonly=readonly)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("alike", [False, True])
def test_one_of_two_keys_makes_a_new_store(
    folder: Path, config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """Both have seen an empty folder; the second to write a marker sees that of the first."""
    other = config if alike else StoreConfig(encrypt_key_file=key_file(tmp_path, 1))
    both = threading.Barrier(2, timeout=30)
    write = marker.write

    def together(root: Path, key: StoreKey | None = None) -> None:
        both.wait()
        write(root, key)

    monkeypatch.setattr(marker, "write", together)

    def opened(given: StoreConfig) -> bool:
        try:
            ChunkStore.open(folder, config=given).close()
        except WrongKey:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(opened, [config, other]))
    assert sum(found) == 1 + alike
    assert opened(config) == found[0] and opened(other) == found[1]


@pytest.mark.parametrize(
    "text",
    ["", "ab", "x" * 64, "ab" * 33, "é" * 32, None],
    ids=["", "short", "x", "long", "é", "-"],
)
def test_a_key_file_without_a_key_is_refused(
    folder: Path, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="the key file") as error:
        ChunkStore.open(folder, config=StoreConfig(encrypt_key_file=path))
    assert not folder.exists() and (not text or text not in str(error.value))


def test_a_missing_package_is_named(
    folder: Path, config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ckv_jax.storage.encryption")
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[encrypt\]'"):
        ChunkStore.open(folder, config=config)
    assert not folder.exists()


@pytest.mark.parametrize("sealed", [True, False], ids=["another key", "no key"])
@pytest.mark.parametrize("repair", [False, True])
def test_what_another_key_wrote_is_left_alone(
    folder: Path, config: StoreConfig, tmp_path: Path, repair: bool, sealed: bool
) -> None:
    """Neither believed, nor damaged, nor repaired, nor evicted."""
    other = StoreConfig(encrypt_key_file=key_file(tmp_path, 1) if sealed else None)
    with ChunkStore.open(tmp_path / "other", config=other) as store:
        theirs = ingest(store, TOKENS)
        store.set_record(theirs.id, PrefixRecord(name=NAME))
    with ChunkStore.open(folder, config=config) as store:
        ingest(store, TOKENS)
    for name in ("segments", "pins"):
        shutil.copytree(tmp_path / "other" / name, folder / name, dirs_exist_ok=True)
    with ChunkStore.open(folder, config=config) as store:
        assert find(store, TOKENS, SMALL).num_tokens == 0
        assert store.record_of(theirs).pinned  # says nothing, which is a pin
        report = verify_store(store, repair)
        assert report.foreign == [theirs.spans[0].segment_id] and not report.removed
        assert not report.damages and not report.quarantined
        assert not prune_store(store, 0).removed
    shutil.copy(tmp_path / "other" / "store.json", folder)
    with ChunkStore.open(folder, config=other) as store:
        right = SMALL.groups * theirs.num_chunks
        assert read_all(store, find(store, TOKENS, SMALL)).right == right
        assert store.record_of(theirs).name == NAME


def test_a_hurt_marker_lets_no_other_key_in(
    folder: Path, config: StoreConfig, tmp_path: Path
) -> None:
    other = StoreConfig(encrypt_key_file=key_file(tmp_path, 1))
    with ChunkStore.open(folder, config=config) as store:
        mine = ingest(store, TOKENS)
        store.set_record(mine.id, PrefixRecord(pinned=True, name=NAME))
    with ChunkStore.open(tmp_path / "plain") as store:
        ingest(store, TOKENS)
    for root in (folder, tmp_path / "plain"):
        (root / "store.json").write_bytes(b"hurt")
    for where, given, said in (
        (folder, None, "not readable without"),
        (folder, other, "with another key"),
        (tmp_path / "plain", config, "not encrypted"),
    ):
        with unchanged(where), pytest.raises(WrongKey, match=said):
            ChunkStore.open(where, config=given)
    with ChunkStore.open(folder, config=config) as store:
        assert read_all(store, find(store, TOKENS, SMALL)).right == SMALL.groups * mine.num_chunks
        assert store.record_of(mine).pinned


def test_a_key_file_that_all_can_read_is_warned_about(
    folder: Path, config: StoreConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert config.encrypt_key_file is not None
    for mode, warned in ((0o600, False), (0o640, False), (0o644, True)):
        os.chmod(config.encrypt_key_file, mode)
        caplog.clear()
        ChunkStore.open(folder, config=config).close()
        assert ("chmod 600" in caplog.text) is warned


def test_an_object_store_has_its_key_too(
    tmp_path: Path, config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorstore as ts

    from ckv_jax.storage.place import objects

    url = f"file://{tmp_path}/bucket/"
    monkeypatch.setattr(objects, "kvstore_spec", lambda _: ts.KvStore.Spec(url).to_json())
    with ChunkStore.open("s3://bucket", config=config) as store:
        prefix = ingest(store, TOKENS, layout=PAGES)
    with ChunkStore.open("s3://bucket", config=config) as store:
        assert read_all(store, prefix).right == PAGES.groups * prefix.num_chunks
    with pytest.raises(WrongKey, match="not readable without"):
        ChunkStore.open("s3://bucket")
    raw = bytes_in(tmp_path / "bucket")
    assert not any(secret in raw for secret in secrets_of(prefix))
    (tmp_path / "bucket" / "store.json").unlink()  # older code made no markers, and no such stores
    with pytest.raises(Exception, match="not a store and is not empty"):
        ObjectFiles("s3://bucket", ts.Context(), StoreConfig(), key_check="ab")


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["packs", "probe", "digest", "assignment"])
def test_a_flipped_bit_is_a_miss_and_is_repaired(
    folder: Path, config: StoreConfig, kind: str
) -> None:
    """As in clear; what is written again is under another nonce."""
    layout = ALIKE if kind == "assignment" else PAGES
    with ChunkStore.open(folder, config=config) as store:
        prefix = ingest(store, TOKENS, layout=layout)
        segment = segment_folder(folder, prefix)
        (shard,) = sorted((segment / kind).glob("c.*"))[:1]
        before, manifest = shard.read_bytes(), (segment / "manifest.json").read_bytes()
        hurt(shard, 5)
        assert not verify_store(store).ok
        if kind == "packs":
            assert read_all(store, prefix) == read_all(store, prefix)
            assert read_all(store, prefix).wrong == 0 and read_all(store, prefix).refused == 1
            assert store.stats()["quarantined"]
            whole = find(store, TOKENS, layout, marked=True)
            kv = kv_of(layout, TOKENS)[:, :, :16]
            assert store.replace_packs(whole, 0, kv) == 1
        elif kind == "assignment":
            with store.reader(prefix) as reader:
                assert reader.lost_orders() == [0]
            whole = find(store, TOKENS, layout, marked=True)
            assert store.replace_packs(whole, 0, kv_of(layout, TOKENS)) == 1
        else:
            assert verify_store(store, repair=True).remade == [prefix.spans[0].segment_id]
        assert verify_store(store).ok
        prefix = find(store, TOKENS, layout)
        assert prefix.num_tokens == len(TOKENS)
        assert read_all(store, prefix).right == layout.groups * prefix.num_chunks
    assert shard.read_bytes() != before  # the same KV, and no nonce that was used before
    assert (segment / "manifest.json").read_bytes() != manifest


def test_packs_of_other_places_do_not_pass(folder: Path, config: StoreConfig) -> None:
    with ChunkStore.open(folder, config=config) as store:
        prefix, other = ingest(store, TOKENS), ingest(store, some_tokens(len(TOKENS), 1))
        one, two = (segment_folder(folder, p) / "packs" for p in (prefix, other))
        name = sorted(p.name for p in one.glob("c.*"))[0]
        data, size = bytearray((one / name).read_bytes()), SMALL.pack_bytes
        data[:size], data[size : 2 * size] = data[size : 2 * size], data[:size]
        (one / name).write_bytes(data)
        shutil.copy(one / name, two / name)
        found = read_all(store, prefix), read_all(store, other)
        assert found[0].wrong == found[1].wrong == 0
        assert found[0].refused == 2 and found[1].right <= SMALL.groups * other.num_chunks // 2


def test_lost_tags_are_a_lost_manifest(folder: Path, config: StoreConfig) -> None:
    """Tags are in the manifest, which is whole or proves its damage."""
    with ChunkStore.open(folder, config=config) as store:
        prefix = ingest(store, TOKENS)
        path = segment_folder(folder, prefix) / "manifest.json"
        data = path.read_bytes()
        assert data.startswith(SEALED)
        hurt(path, len(data) // 2)
        assert find(store, TOKENS, SMALL).num_tokens == 0
        report = verify_store(store, repair=True)
        assert [d.kind for d in report.damages] == ["manifest"] and not report.foreign
        assert report.removed == [prefix.spans[0].segment_id]


def test_a_record_that_is_hurt_is_a_pin(folder: Path, config: StoreConfig) -> None:
    with ChunkStore.open(folder, config=config) as store:
        prefix = ingest(store, TOKENS)
        store.set_record(prefix.id, PrefixRecord(name=NAME))
        hurt(folder / "pins" / prefix.id, 60)
        assert store.record_of(prefix) == PrefixRecord(pinned=True)


def test_room_is_made_for_what_encryption_adds(tmp_path: Path, config: StoreConfig) -> None:
    """A nonce and a tag in place of each checksum, as text."""
    sizes = []
    for name, one in (("clear", None), ("sealed", config)):
        with ChunkStore.open(tmp_path / name, config=one) as store:
            prefix = ingest(store, TOKENS, layout=SMALL)
            path = segment_folder(tmp_path / name, prefix) / "manifest.json"
            sizes.append(path.stat().st_size)
            manifest = store.index.manifest(prefix.spans[0].segment_id, prefix.spans[0].checksum)
    assert sizes[0] < sizes[1] <= sizes[0] + manifest.encryption_bytes < 3 * sizes[1]


# -- the format ------------------------------------------------------------------------------------


def test_the_bytes_of_a_key(tmp_path: Path) -> None:
    """What is on disk can be opened by later code: these bytes were written by this."""
    key = StoreKey(bytes(range(32)))
    assert key.check == "6e0a95b16262c1781b4d281084e0022a"
    assert (
        key.derive(b"segment", bytes(32)).hex()
        == "31bba7bca06830907e2f0cf5db770e592629137b39f22de33bdeba75881960dd"
    )
    assert key.open("name", key.seal("name", b"text")) == b"text"
    with pytest.raises(ValueError, match="as it was written"):
        key.open("name", key.seal("name", b"text")[:-1])
    with pytest.raises(Exception, match="another key, or tampered with"):
        key.open("other", key.seal("name", b"text"))


def test_no_nonce_is_used_twice(folder: Path, config: StoreConfig) -> None:
    with ChunkStore.open(folder, config=config) as store:
        prefix = ingest(store, TOKENS, layout=PAGES)
        path = segment_folder(folder, prefix) / "manifest.json"
    key = StoreKey.load(str(config.encrypt_key_file))
    manifest, _ = Manifest.decode(path.read_bytes(), prefix.spans[0].segment_id, key)
    tables = manifest.tables.values()
    nonces = [entry.tobytes()[:8] for table in tables for entry in table.reshape(-1, 24)]
    assert len(set(nonces)) == len(nonces) and len(nonces) > 50
    body = json.loads(key.open(manifest.segment_id, path.read_bytes()))["body"]
    assert len(bytes.fromhex(body["encrypted"])) == 32
