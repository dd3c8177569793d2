"""A store of objects: uploads, manifests, pins, markers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorstore as ts
from place_support import ID, OTHER, never

from ckv_jax.storage import StoreError, StoreUnavailable
from ckv_jax.storage.errors import SegmentUnfinished
from ckv_jax.storage.place import marker
from ckv_jax.storage.place.objects import ObjectFiles, kvstore_spec
from ckv_jax.storage.segment import manifest as manifests


@pytest.fixture
def objects() -> ObjectFiles:
    return ObjectFiles("memory://", ts.Context(), 5.0)


def stored(objects: ObjectFiles) -> dict[str, bytes]:
    keys = objects._store.list().result()
    return {key.decode(): bytes(objects._store.read(key).result().value) for key in keys}


def upload(objects: ObjectFiles, keep: Callable[[], bool] = never) -> bool:
    made = objects.workspace()
    (made.path / "packs").mkdir()
    (made.path / "packs" / "c.0").write_bytes(b"0123456789")
    (made.path / manifests.FILE).write_bytes(b"manifest")
    try:
        return made.publish(ID, keep)
    finally:
        for _ in range(2):
            made.discard()
            assert not made.path.exists()


def test_objects_are_uploaded_read_mended_and_removed(objects: ObjectFiles) -> None:
    assert objects.catalog_path is None and not objects.holding and stored(objects) == {}
    assert upload(objects)
    base = f"segments/ab/{ID}"
    assert stored(objects) == {
        "store.json": marker.DATA, f"{base}/packs/c.0": b"0123456789",
        f"{base}/manifest.json": b"manifest",
    }  # fmt: skip
    assert not upload(objects, lambda: True) and upload(objects, lambda: False)
    beside = f"segments1/cd/{OTHER}/packs"
    objects._store.write(beside, b"").result()
    assert objects.segment_ids() == {ID} and objects.manifest(ID) == b"manifest"
    assert objects.read(ID, "packs/c.0", 2, 3) == b"234"
    assert objects.read(ID, "packs/c.0", 8, 3) is objects.read(ID, "none", 0, 1) is None
    objects.mend(ID, "packs/c.0", 12, {1: b"ab", 11: b"z"})
    assert objects.read(ID, "packs/c.0", 0, 12) == b"0ab3456789\0z"
    objects.mend(ID, "packs/c.0", 4, {})
    assert stored(objects)[f"{base}/packs/c.0"] == b"0ab3"
    objects.mend(ID, "packs/c.1", 2, {0: b"x"})
    assert stored(objects)[f"{base}/packs/c.1"] == b"x\0"
    objects.put_manifest(ID, b"new")
    assert objects.manifest(ID) == b"new"
    spec = objects.kvstore(ID, "packs")
    assert (spec["driver"], spec["path"]) == ("memory", f"{base}/packs/")
    removed = objects.claim(ID).remove()
    with pytest.raises(SegmentUnfinished, match="no manifest"):
        objects.manifest(ID)
    assert objects.segment_ids() == {ID}  # what is left of it
    removed()
    assert objects.segment_ids() == set() and set(stored(objects)) == {"store.json", beside}
    assert objects.damaged(ID, {"x": 1}) == objects.dead(["x"]) == set() and objects.sweep() == 0
    with pytest.raises(OSError, match="no direct reads") as error:
        objects.open_direct(ID, "packs/c.0")
    assert error.value.errno == errno.ENOTSUP


def test_manifests_of_many_objects_come_in_their_order(
    objects: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_BYTES", 8)
    ids = [f"{n:032x}" for n in range(130)]
    for n, id_ in enumerate(ids):
        if n != 70:
            objects.put_manifest(id_, b"x" * (9 if n == 129 else 8))
    found = list(objects.manifests(ids))
    assert [id_ for id_, _ in found] == ids
    bad = {n: data for n, (_, data) in enumerate(found) if data != b"x" * 8}
    assert isinstance(bad.pop(70), SegmentUnfinished)
    assert "too large" in str(bad.pop(129)) and not bad


def test_pins_are_objects_too(objects: ObjectFiles) -> None:
    objects.set_pin(ID, b"wish")
    objects._store.write("pins/notes", b"no id").result()
    objects._store.write("pinsx", b"beside").result()
    assert objects.pins() == {ID: b"wish"}
    objects.set_pin(ID, None)
    assert objects.pins() == {}
    with pytest.raises(ValueError, match="expected hex"):
        objects.set_pin("x", b"")


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("pins/x", True), ("segments/x", True), ("aaa", False), ("pins", False), ("pinsa", False),
        ("segment", False), ("segmentsa", False), ("zzz", False), ("q", False),
    ],
)  # fmt: skip
def test_a_place_without_a_marker_is_ours_if_nothing_else_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, ours: bool
) -> None:
    from ckv_jax.storage.place import objects as module

    url = f"file://{tmp_path}/"
    monkeypatch.setattr(module, "kvstore_spec", lambda _: ts.KvStore.Spec(url).to_json())
    ts.KvStore.open(url).result().write(key, b"x").result()
    if ours:
        looking = ObjectFiles(url, ts.Context(), 5.0, readonly=True)
        with pytest.raises(StoreError, match="look only"):
            looking.set_pin(ID, b"")
    else:
        with pytest.raises(StoreError, match="not a store, and not empty"):
            ObjectFiles(url, ts.Context(), 5.0)


def test_where_a_bucket_is_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    plainly = kvstore_spec("s3://bucket/a")
    assert plainly["path"] == "a/" and not {"endpoint", "aws_region"} & plainly.keys()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all")
    monkeypatch.setenv("AWS_REGION", "eu")
    assert kvstore_spec("s3://bucket/a/")["endpoint"] == "http://all"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    spec = kvstore_spec("s3://bucket/a/")
    assert (spec["endpoint"], spec["aws_region"], spec["path"]) == ("http://s3", "eu", "a/")
    assert "endpoint" not in kvstore_spec("gs://bucket")
    with pytest.raises(ValueError, match="url: got 'ftp://x'"):
        kvstore_spec("ftp://x")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "no endpoint")
    with pytest.raises(StoreUnavailable, match="s3://bucket: cannot be opened: "):
        ObjectFiles("s3://bucket", ts.Context(), 5.0)
