"""What a power cut may find: nothing has its name before its bytes are on the disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ckv_jax.storage import ChunkStore
from tests.support.truth import ingest, some_tokens

Event = tuple[str, str]
"""("fsync", path), ("rename", new path)."""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Every fsync, by the name that its file has at that moment, and every rename, in order."""
    seen: list[Event] = []
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync", "rename", "replace")}

    def sync(name: str) -> object:
        def recorded(fd: int) -> None:
            seen.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
            real[name](fd)

        return recorded

    def move(name: str) -> object:
        def recorded(old: object, new: object, **more: object) -> None:
            real[name](old, new, **more)
            seen.append(("rename", os.fspath(new)))  # type: ignore[call-overload]

        return recorded

    for name in real:
        monkeypatch.setattr(os, name, (sync if "sync" in name else move)(name))
    return seen


def test_all_of_a_segment_is_durable_before_its_name_is(folder: Path, events: list[Event]) -> None:
    with ChunkStore.open(folder) as store:
        events.clear()
        id_ = ingest(store, some_tokens(100)).spans[0].segment_id
        home = folder / "segments" / id_[:2] / id_
        published = events.index(("rename", str(home)))
        before = [path for kind, path in events[:published] if kind == "fsync"]
        written = [p for p in before if p.startswith(f"{folder}/tmp/")]
        (work,) = {Path(p).relative_to(folder / "tmp").parts[0] for p in written}
        files = [p for p in home.rglob("*") if stat.S_ISREG(p.lstat().st_mode)]
        assert len(files) > 6
        for path in [*files, *(p for p in home.rglob("*") if p.is_dir()), home]:
            at = folder / "tmp" / work / path.relative_to(home)
            assert str(at) in before, f"{path.relative_to(home)} was not synced before the rename"
        # Names in a folder are on the disk when the folder is synced: files first, then folders.
        for path in files:
            at = folder / "tmp" / work / path.relative_to(home)
            last = len(written) - 1 - written[::-1].index(str(at.parent))
            assert written.index(str(at)) < last, f"{at.parent} was synced before {at.name}"
        assert str(home.parent.parent) in before  # the new fan-out folder has its name
        after = [path for kind, path in events[published + 1 :] if kind == "fsync"]
        assert str(home.parent) in after, "the rename itself was not made durable"


def test_a_pin_is_durable_before_it_is_promised(folder: Path, events: list[Event]) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(32))
        events.clear()
        store.files.set_pin(prefix.id, b"")
        renamed = events.index(("rename", str(folder / "pins" / prefix.id)))
        kinds = [kind for kind, _ in events[:renamed]]
        assert kinds.count("fsync") == 1  # the file, still under another name
        assert ("fsync", str(folder / "pins")) in events[renamed + 1 :]
        events.clear()
        store.files.set_pin(prefix.id, None)
        assert ("fsync", str(folder / "pins")) in events
