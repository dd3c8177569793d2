"""The same store behind s3:// and memory://; S3 is moto's server process on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from segment_support import at_most, find

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    Prefix,
    PrefixNotFound,
    StoreConfig,
    StoreError,
    WrongKey,
    pin_prefix,
    prune_store,
    verify_store,
)
from ckv_jax.storage.place import marker, objects
from ckv_jax.storage.place.objects import ObjectFiles
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, read_probe, some_tokens

ID, OTHER = "ab" * 16, "cd" * 16
"""Names of two prefixes."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """URL of a bucket on an S3 server of its own; the environment says where it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    before = {name: os.environ.get(name) for name in settings}
    try:
        for _ in range(300):
            try:
                request = urllib.request.Request(f"{endpoint}/ckv-bucket", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
                break
            except OSError:
                time.sleep(0.1)
        os.environ.update(settings)
        yield "s3://ckv-bucket"
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})
        server.terminate()
        server.wait(20)


def a_shard(store: ChunkStore, prefix: Prefix) -> str:
    """The name of the object with the packs of the first group of layers."""
    id_ = prefix.spans[0].segment_id
    return f"segments/{id_[:2]}/{id_}/packs/c.0.0.0.0.0.0"


def test_s3_keeps_prefixes(bucket: str) -> None:
    layout = Layout(
        num_layers=4, num_kv_heads=2, head_dim=8, pack_layers=2, digest="int4", probe="keys"
    )
    tokens = some_tokens(150)
    url = f"{bucket}/some/store"
    with ChunkStore.open(url) as store:
        ingest(store, tokens[:96], layout=layout)
        prefix = ingest(store, tokens, layout=layout)
        assert read_all(store, prefix).right == layout.groups * prefix.num_chunks
    with ChunkStore.open(url) as other:  # the index comes from the manifests
        found = other.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=layout)
        assert found == prefix and [p.id for p in other.prefixes()] == [prefix.id]
        outcome = read_all(other, found)
        assert outcome.right == layout.groups * 10 and not outcome.wrong
        with other.reader(found) as reader:
            digest = reader.read_digest()
            out = np.empty((150, 2, 8), layout.numpy_dtype)
            assert read_probe(reader, 2, out) == 150
        assert digest is not None and digest.arrays["codes"].shape == (4, 150, 2, 4)
        assert verify_store(other).ok

        with ChunkStore.open(url) as third:
            again = ingest(third, some_tokens(40, 1), layout=layout)
        assert len(other.prefixes()) == 1
        other.refresh()
        assert len(other.prefixes()) == 2
        pin_prefix(other, again.id)
        assert prune_store(other, 0).removed == 2
        assert [p.id for p in other.prefixes()] == [again.id]
        third_time = ingest(other, tokens, layout=layout)
        assert read_all(other, third_time).right == layout.groups * 10


def test_s3_faults_are_misses(bucket: str) -> None:
    tokens = some_tokens(100)
    with ChunkStore.open(f"{bucket}/faults") as store:
        prefix = ingest(store, tokens)
        id_, name = prefix.spans[0].segment_id, a_shard(store, prefix)
        keys = store.files._store  # type: ignore[attr-defined]
        data = bytearray(keys.read(name).result().value)
        data[SMALL.pack_bytes + 7] ^= 1
        keys.write(name, bytes(data)).result()
        outcome = read_all(store, prefix)
        assert outcome.refused == 1 and not outcome.wrong
        found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=SMALL)
        assert found.num_tokens == 16
        keys.write(name, None).result()
        assert read_all(store, prefix).wrong == 0
        manifest = f"segments/{id_[:2]}/{id_}/manifest.json"
        keys.write(manifest, None).result()
    with ChunkStore.open(f"{bucket}/faults") as store:  # an upload that was killed: no manifest
        assert store.prefixes() == []
        report = verify_store(store, repair=True)  # which looks like one that goes on
        assert report.unfinished == [id_] and not report.damages and not report.removed
        assert read_all(store, ingest(store, tokens)).right == SMALL.groups * 7
        report = verify_store(store)
        assert report.ok and not report.unfinished


@pytest.mark.parametrize("damage", ["bit", "short", "gone"])
def test_packs_are_mended_in_an_object_store(damage: str) -> None:
    tokens = some_tokens(100)
    with ChunkStore.open("memory://") as store:
        prefix = ingest(store, tokens)
        shard = a_shard(store, prefix)
        keys = store.files._store  # type: ignore[attr-defined]
        whole = bytes(keys.read(shard).result().value)
        data = bytearray(whole)
        data[2 * SMALL.pack_bytes + 7] ^= 1
        left = {"bit": bytes(data), "short": whole[: 3 * SMALL.pack_bytes], "gone": None}
        keys.write(shard, left[damage]).result()
        outcome = read_all(store, prefix)
        assert outcome.refused == (1 if damage == "bit" else 7) and not outcome.wrong
        assert store.stats()["bad_packs"] == outcome.refused and store.stats()["unread"] == 0
        marked = find(store, tokens, SMALL, marked=True)
        mended = store.replace_packs(marked, 0, kv_of(SMALL, tokens))
        assert mended == {"bit": 1, "short": 7, "gone": 7}[damage]
        assert keys.read(shard).result().value == whole
        assert read_all(store, find(store, tokens, SMALL)).right == SMALL.groups * 7
        assert verify_store(store).ok


class BeforeTheManifest:
    """A bucket's objects; does something just before a manifest is written."""

    def __init__(self, keys: ts.KvStore, act: Callable[[], None]) -> None:
        self._keys, self._act = keys, act

    def write(self, name: str, data: bytes | None) -> object:
        if name.endswith("/manifest.json") and data is not None:
            self._act()
        return self._keys.write(name, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._keys, name)


def test_a_repair_leaves_an_upload_that_goes_on_alone(bucket: str) -> None:
    """And what continues the segment that is being uploaded."""
    tokens, url = some_tokens(100), f"{bucket}/beside"
    with ChunkStore.open(url) as store, ChunkStore.open(url) as other:
        parent, _ = ingest(store, tokens[:48]), ingest(store, tokens)
        id_ = parent.spans[0].segment_id
        assert store.bounds.remove(id_, "test")
        reports = []
        store.files._store = BeforeTheManifest(  # type: ignore[attr-defined]
            store.files._store,  # type: ignore[attr-defined]
            lambda: reports.append(verify_store(other, repair=True)),
        )
        again = ingest(store, tokens[:48])
        (report,) = reports
        assert report.unfinished == [id_] and not report.removed and not report.damages
        assert read_all(store, again).right == SMALL.groups * 3
        found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=SMALL)
        assert read_all(store, found).right == SMALL.groups * 7
        assert verify_store(other).segments == 2


def test_an_eviction_of_another_process_is_seen(bucket: str) -> None:
    """What it removed is gone rather than bad, and is uploaded again after it died half-way."""
    tokens, url = some_tokens(64), f"{bucket}/evicted"
    with ChunkStore.open(url) as store, ChunkStore.open(url) as other:
        prefix = ingest(store, tokens)
        other.refresh()
        assert find(other, tokens, SMALL) == prefix
        assert prune_store(store, 0).removed == 1
        assert read_all(other, prefix).refused == SMALL.groups * 4
        stats = other.stats()
        assert stats["gone"] == stats["bad_packs"] == SMALL.groups * 4
        assert not stats["quarantined"]

        with other.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer:
            ingest(store, tokens)
            other.refresh()
            assert find(other, tokens, SMALL) == find(store, tokens, SMALL)
            id_ = prefix.spans[0].segment_id
            keys = store.files._store  # type: ignore[attr-defined]
            keys.write(f"segments/{id_[:2]}/{id_}/manifest.json", None).result()
            writer.write(0, kv_of(SMALL, tokens))
            again = writer.commit()
    with ChunkStore.open(url) as store:
        assert find(store, tokens, SMALL) == again
        assert read_all(store, again).right == SMALL.groups * 4


def test_a_pin_that_comes_after_an_eviction_of_another_process_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prefix is found, and gone when the pin is written."""
    with ChunkStore.open("memory://") as store:
        prefix, set_pin = ingest(store, some_tokens(64)), store.files.set_pin
        id_, keys = prefix.spans[0].segment_id, store.files._store  # type: ignore[attr-defined]

        def late(prefix_id: str, record: bytes | None) -> None:
            keys.write(f"segments/{id_[:2]}/{id_}/manifest.json", None).result()
            set_pin(prefix_id, record)

        monkeypatch.setattr(store.files, "set_pin", late)
        with pytest.raises(PrefixNotFound):
            pin_prefix(store, prefix.id)
        assert not store.files.pinned_ids()


def test_room_is_made_of_nothing_that_is_open() -> None:
    """The segment that a new one continues, for instance, though nothing is locked."""
    tokens, size = some_tokens(128), SMALL.segment_bytes(64)
    config = StoreConfig(max_bytes=2 * size, eviction="lru")
    with ChunkStore.open("memory://", config=config) as store:
        ingest(store, tokens[:64])
        ingest(store, some_tokens(64, 1))
        prefix = ingest(store, tokens)
        assert [p.id for p in store.prefixes()] == [prefix.id]
        assert read_all(store, prefix).right == SMALL.groups * 8
        with store.reader(prefix):
            assert prune_store(store, 0).removed == 0
        assert prune_store(store, 0).removed == 2


def test_bad_packs_of_one_read_ask_for_their_manifest_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, manifest = list[str](), ObjectFiles.manifest

    def counted(self: ObjectFiles, segment_id: str) -> bytes:
        asked.append(segment_id)
        return manifest(self, segment_id)

    monkeypatch.setattr(ObjectFiles, "manifest", counted)
    with ChunkStore.open("memory://") as store:
        prefix = ingest(store, some_tokens(100))
        files, out = store.files, np.empty((7, *SMALL.stored_shape), SMALL.stored_dtype)
        keys = files._store  # type: ignore[attr-defined]
        probe = np.empty((100, SMALL.probe_heads, SMALL.head_dim), SMALL.numpy_dtype)
        keys.write(a_shard(store, prefix), None).result()
        with store.reader(prefix) as reader:
            asked.clear()
            assert not reader.read_packs(0, np.arange(7), out).any()
            assert len(asked) == 1 and store.stats()["quarantined"] == 7
            for name in files._list("segments/"):  # type: ignore[attr-defined]
                keys.write(name, None).result()
            assert not reader.read_packs(1, np.arange(7), out).any()
            assert len(asked) == 2
            assert read_probe(reader, SMALL.probe_layers[0], probe) == 0
            assert len(asked) == 3
        assert store.stats()["gone"] == 14 and store.stats()["quarantined"] == 7


def test_files_of_a_segment_may_take_as_long_as_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: dict[str, float | None] = {}
    real = ObjectFiles._wait

    def wait(self: ObjectFiles, future: object, what: str, seconds: float | None = None) -> object:
        waits[what.rpartition("/")[2]] = seconds
        return real(self, future, what, seconds)

    monkeypatch.setattr(ObjectFiles, "_wait", wait)
    with ChunkStore.open("memory://", config=StoreConfig(write_s=77.0)) as store:
        ingest(store, some_tokens(64))
    assert waits["c.0.0.0.0.0.0"] == waits["manifest.json"] == 77.0
    assert waits["listing "] is None  # of the place when it was opened


_WRITE = """
import os, signal
from tests.support.truth import FINGERPRINT, SMALL, kv_of, some_tokens
from ckv_jax.storage import ChunkStore
tokens = some_tokens(64)
writer = ChunkStore.open("memory://").writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens)
writer.write(0, kv_of(SMALL, tokens))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_killed_writers_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of writers that live, nor new ones, nor what is not ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    subprocess.run(
        [sys.executable, "-c", _WRITE], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    (left,) = tmp_path.iterdir()
    assert any(file.is_file() for file in left.rglob("*"))

    def sweep() -> set[Path]:
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0), follow_symlinks=False)
        new.touch()
        with ChunkStore.open("memory://") as other:
            swept.append(other.stats()["swept"])
        return set(tmp_path.iterdir())

    new, others, swept = tmp_path / "ckv-upload-abcd_123", tmp_path / "ckv-abcd_123", []
    new.mkdir()
    others.mkdir()
    link = tmp_path / "ckv-upload-efgh_456"
    link.symlink_to(others)
    with ChunkStore.open("memory://") as store:
        tokens = some_tokens(64)
        with store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer:
            (mine,) = set(tmp_path.iterdir()) - {left, new, others, link}
            assert sweep() == {mine, new, others, link}
            writer.write(0, kv_of(SMALL, tokens))
            assert read_all(store, writer.commit()).refused == 0
        assert sweep() == {new, others, link} and swept == [1, 0]


def test_an_endpoint_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with at_most(15), pytest.raises(StoreError, match="cannot be"):
            ChunkStore.open("s3://ckv-bucket/x", config=StoreConfig(deadline_s=1.0))


@pytest.mark.parametrize("url", ["gs://ckv-bucket/a/b", "gs://ckv-bucket", "s3://ckv-bucket/a/b/"])
def test_urls_become_kvstores(url: str) -> None:
    spec = objects.kvstore_spec(url)
    assert spec["bucket"] == "ckv-bucket" and spec["path"] in ("", "a/b/")
    assert spec["driver"] == ("gcs" if url.startswith("gs") else "s3")


# -- files of an object store --------------------------------------------------------------------


def test_an_object_store_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore's own file driver stands in for a bucket, behind the code of object stores."""
    bucket = tmp_path / "bucket"
    url, mark = f"file://{bucket}/", bucket / marker.FILE
    monkeypatch.setattr(objects, "kvstore_spec", lambda _: ts.KvStore.Spec(url).to_json())
    place = ObjectFiles(url, ts.Context(), StoreConfig())
    assert not bucket.exists()  # looking made nothing
    place.set_pin(ID, b"")
    assert json.loads(mark.read_bytes())["format"] == "ckv-store"
    mark.unlink()
    place.set_pin(OTHER, b"")
    assert not mark.exists()  # it is written once
    mark.write_text('{"format": "ckv-store", "version": 1}')
    with pytest.raises(StoreError, match="version 1, expected 2"):
        ObjectFiles(url, ts.Context(), StoreConfig())
    mark.unlink()
    # From before there were markers:
    looking = ObjectFiles(url, ts.Context(), StoreConfig(), readonly=True)
    with pytest.raises(StoreError, match="read-only"):
        looking.set_pin(ID, b"")
    for name in ("aaa", "pinsa", "segment", "segmentsa", "zzz"):
        (bucket / name).write_text("precious")
        with pytest.raises(StoreError, match="not a store and is not empty"):
            ObjectFiles(url, ts.Context(), StoreConfig())
        (bucket / name).unlink()


@pytest.mark.parametrize("place", ["memory://", "s3"])
def test_one_of_two_keys_makes_a_new_store(place: str, request: pytest.FixtureRequest) -> None:
    """Both have seen an empty place; the second to write sees the marker of the first."""
    url = place if place != "s3" else f"{request.getfixturevalue('bucket')}/keys"
    context = ts.Context()
    first, alike, other = (
        ObjectFiles(url, context, StoreConfig(), key_check=key) for key in ("aa", "aa", "bb")
    )
    first.set_pin(ID, b"1")
    alike.set_pin(ID, b"2")
    for _ in range(2):
        with pytest.raises(WrongKey, match="another key"):
            other.set_pin(ID, b"3")
    assert first.pin(ID) == b"2"
