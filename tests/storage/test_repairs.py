"""What becomes of a damaged segment, and what is said of it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from segment_support import ALIKE, hurt, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    Prefix,
    StoreUnavailable,
    verify_store,
)
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.tools.verify import Damage, planned_repairs
from tests.support.truth import SMALL, ingest, some_tokens

# -- what a repair would do, and does ------------------------------------------------------------


POSITION = dataclasses.replace(SMALL, digest="int4")
LAYOUTS = {
    "alike": ALIKE,
    "position": POSITION,
    "reordered": dataclasses.replace(POSITION, reordered=True),
}
PARENT = 16 * 16
"""Tokens of three runs of four chunks, and of what is not grouped."""
HERE = 8
"""The first chunk of the last run."""
TOKENS = some_tokens(PARENT + 16 * 8)

Hurt = Callable[[Path, Prefix], None]


def made(folder: Path, layout: Layout) -> Prefix:
    """A store of a text of two segments."""

    def order(tokens: int) -> np.ndarray | None:
        return np.roll(np.arange(tokens), 40) if layout.reordered else None

    with ChunkStore.open(folder) as store:
        ingest(store, TOKENS[:PARENT], layout=layout, order=order(PARENT))
        prefix = ingest(store, TOKENS, layout=layout, order=order(len(TOKENS) - PARENT))
    assert len(prefix.spans) == 2
    return prefix


def no_manifest(folder: Path, prefix: Prefix) -> None:
    hurt(segment_folder(folder, prefix) / "manifest.json", 40)


def pack(span: int, *chunks: int) -> Hurt:
    """Packs of the first group."""

    def flip(folder: Path, prefix: Prefix) -> None:
        path = sorted(segment_folder(folder, prefix, span).glob("packs/c.*"))[0]
        for chunk in chunks:
            hurt(path, chunk * prefix.layout.pack_bytes + 3)

    return flip


def digest(span: int) -> Hurt:
    def flip(folder: Path, prefix: Prefix) -> None:
        hurt(sorted(segment_folder(folder, prefix, span).glob("digest/c.*"))[0], 3)

    return flip


def both(*hurts: Hurt) -> Hurt:
    def flip(folder: Path, prefix: Prefix) -> None:
        for one in hurts:
            one(folder, prefix)

    return flip


DAMAGES: dict[str, Hurt] = {
    "parent's manifest": no_manifest,
    "parent's first pack": pack(0, 0),
    "parent's later run": pack(0, HERE + 2),
    "all of the parent": pack(0, *range(PARENT // 16)),
    "parent's digest": digest(0),
    "parent's digest and later run": both(digest(0), pack(0, HERE + 2)),
    "child's pack": pack(1, 3),
    "both": both(pack(0, HERE + 2), pack(1, 0)),
    "parent's manifest, child's pack": both(no_manifest, pack(1, 3)),
}


def outcome(folder: Path, prefix: Prefix) -> tuple[dict[str, str], dict[str, str]]:
    """Of each segment what a repair would do, and what it does."""
    ids = {"parent": prefix.spans[0].segment_id, "child": prefix.spans[1].segment_id}
    with ChunkStore.open(folder) as store:
        lines = dict(line.split(": ", 1) for line in planned_repairs(store, verify_store(store)))
        told = {name: lines.get(id_, "") for name, id_ in ids.items()}
        report = verify_store(store, repair=True)
        done = {}
        for name, id_ in ids.items():
            found = store.index.find(id_)
            if found is None:
                assert id_ in report.removed and not segment_there(folder, id_)
                done[name] = "be removed"
            elif id_ in report.remade:
                done[name] = "be repaired: the damaged data is rebuilt from its packs"
            elif id_ not in report.quarantined:
                assert found.usable == found.manifest.chunks
                done[name] = ""
            elif id_ in report.unrepaired:
                done[name] = "be kept but not served until its text is ingested again"
            else:
                whole, size = found.manifest.chunks, found.manifest.layout.chunk_tokens
                tokens = found.manifest.layout.cut(found.usable * size, len(found.manifest.tokens))
                done[name] = f"be limited to its first {tokens // size} of {whole} chunks"
    return told, done


def segment_there(folder: Path, id_: str) -> bool:
    return (folder / "segments" / id_[:2] / id_).exists()


@pytest.fixture(scope="module")
def stores(
    tmp_path_factory: pytest.TempPathFactory, short_runs: None
) -> dict[str, tuple[Path, Prefix]]:
    root = tmp_path_factory.mktemp("stores")
    return {name: (root / name, made(root / name, LAYOUTS[name])) for name in LAYOUTS}


@pytest.fixture
def text(
    request: pytest.FixtureRequest, stores: dict[str, tuple[Path, Prefix]], folder: Path
) -> Prefix:
    """A text of two segments, stored in `folder`; in the layout that the test names."""
    whole, prefix = stores[request.getfixturevalue("layout")]
    shutil.copytree(whole, folder)
    return prefix


@pytest.mark.parametrize(
    ("layout", "damage"),
    [("position", damage) for damage in DAMAGES if damage != "all of the parent"]
    + [("reordered", "all of the parent"), ("reordered", "parent's later run")]
    + [("alike", damage) for damage in ("parent's later run", "parent's digest", "both")],
)
def test_what_would_be_done_is_done(folder: Path, text: Prefix, layout: str, damage: str) -> None:
    DAMAGES[damage](folder, text)
    told, done = outcome(folder, text)
    assert told == done and any(done.values())
    if damage.startswith(("parent's manifest", "all")):
        assert set(done.values()) == {"be removed"}
    if damage == "parent's digest":
        assert "be repaired" in done["parent"] and not done["child"]
    if damage == "parent's later run":
        by_layout = {
            (True, False): f"be limited to its first {HERE} of {PARENT // 16} chunks",
            (False, False): f"be limited to its first {HERE + 2} of {PARENT // 16} chunks",
            (False, True): "be removed",
        }
        assert done["parent"] == by_layout[text.layout.alike, text.layout.reordered]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("read_packs", "packs"), ("read_probe_pages", "probe"), ("read_digest", "digest")],
)
def test_what_cannot_be_read_now_is_told_and_not_damage(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    layout = dataclasses.replace(SMALL, digest="int4")
    prefix = ingest(store, some_tokens(64), layout=layout)

    def late(*_: object) -> None:
        if kind != "digest":
            raise StoreUnavailable("the disk has not answered")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixReader, name, late)
        report = verify_store(store, repair=True)
    (unread,) = report.unread
    said = "digest: not read" if kind == "digest" else "the disk has not answered"
    assert unread == Damage(prefix.spans[0].segment_id, 0, said, kind)
    assert not report.ok and not report.damages and report.segments == 1
    assert verify_store(store).ok
