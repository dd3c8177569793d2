"""Places that are full, cannot be written, or are gone: named, and nothing is made there."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from segment_support import find, segment_folder
from typer.testing import CliRunner

from ckv_jax.cli.app import app
from ckv_jax.storage import (
    ChunkStore,
    StoreError,
    StoreFull,
    StoreUnavailable,
    inspect_store,
    pin_prefix,
    prune_store,
    verify_store,
)
from tests.support.truth import SMALL, ingest, read_all, some_tokens

TOKENS = some_tokens(64)


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Every call of an `os` function fails."""

    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("name", ["pwrite", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EROFS, StoreUnavailable)]
)
def test_a_full_disk_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, kind: type[StoreError]
) -> None:
    with ChunkStore.open(folder) as store:
        kept = ingest(store, TOKENS)
        with monkeypatch.context() as patch:
            refuse(patch, name, code)
            with pytest.raises(kind, match=str(folder)):
                ingest(store, some_tokens(64, 1))
        assert read_all(store, kept).refused == 0
        assert not list((folder / "tmp").iterdir())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Where a disk of its own is mounted, or rather linked, so that anybody may take it away."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second device")
    with tempfile.TemporaryDirectory(dir=memory) as name:
        (tmp_path / "disk").symlink_to(name)
        yield tmp_path / "disk"


@pytest.mark.parametrize("below", ["", "store"])
def test_a_place_that_is_gone_is_named_and_nothing_is_made_there(disk: Path, below: str) -> None:
    """As when a disk is unmounted: an empty folder is left, and the disk may come back."""
    folder, device = disk / below, disk.readlink()
    with ChunkStore.open(folder) as store:
        kept = ingest(store, TOKENS)
        disk.unlink()
        disk.mkdir()
        assert find(store, TOKENS, SMALL).num_tokens == 0
        assert read_all(store, kept).right == 0
        for act in (
            store.usage,
            lambda: ingest(store, some_tokens(64, 1)),
            lambda: prune_store(store, 0),
            lambda: pin_prefix(store, kept.id),
            lambda: verify_store(store, repair=True),
            lambda: inspect_store(store),
        ):
            with pytest.raises(StoreUnavailable, match=f"{folder}: .*no longer mounted"):
                act()
        assert not list(disk.iterdir())
        disk.rmdir()
        disk.symlink_to(device)
        assert read_all(store, find(store, TOKENS, SMALL)).right == 8
        assert ingest(store, some_tokens(64, 1)).num_tokens == 64
        disk.unlink()
        disk.mkdir()
    assert not list(disk.iterdir())


def test_a_folder_that_cannot_be_written_is_named_and_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(folder) as store:
        kept = ingest(store, TOKENS)
    real = os.open

    def readonly(path: object, flags: int, *args: object, **named: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", readonly)
    refuse(monkeypatch, "mkdir", errno.EROFS)
    with ChunkStore.open(folder) as store:
        assert read_all(store, find(store, TOKENS, SMALL)).right == 8
        for act in (lambda: ingest(store, some_tokens(64, 1)), lambda: prune_store(store, 0)):
            with pytest.raises(StoreUnavailable, match=str(folder)):
                act()
    for command in (["prune", str(folder), "--max-bytes", "0"], ["pin", str(folder), kept.id]):
        found = CliRunner().invoke(app, command)
        assert found.exit_code and isinstance(found.exception, StoreUnavailable)


@pytest.mark.parametrize("version", [1, 99], ids=["older", "newer"])
def test_what_cannot_be_used_is_told_by_inspect(folder: Path, version: int) -> None:
    with ChunkStore.open(folder) as store:
        old, bad = ingest(store, TOKENS), ingest(store, some_tokens(64, 1))
    path = segment_folder(folder, old) / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    body["layout"]["version"] = version
    data = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(b'{"sha256":"%s","body":%s}\n' % (sha256(data).hexdigest().encode(), data))
    (segment_folder(folder, bad) / "manifest.json").write_text("{}")
    with ChunkStore.open(folder, readonly=True) as store:
        unusable = inspect_store(store).unusable
    assert f"version {version}" in unusable[old.spans[0].segment_id]
    assert "ingest its text again" in unusable[old.spans[0].segment_id]
    assert "bad manifest" in unusable[bad.spans[0].segment_id]
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0 and "ingest its text again" in shown.stderr
    with ChunkStore.open(folder) as store:
        report = verify_store(store, repair=True)
    assert report.foreign == [old.spans[0].segment_id] and path.exists()  # another may read it
