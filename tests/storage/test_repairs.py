"""What becomes of a damaged segment, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from segment_support import ALIKE, find, hurt, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    Prefix,
    StoreUnavailable,
    pin_prefix,
    verify_store,
)
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.tools.verify import Damage, planned_repairs
from tests.support.truth import SMALL, ingest, read_all, some_tokens

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


def made(folder: Path, layout: Layout) -> Prefix:
    """A store of a text of two segments."""

    def order(tokens: int) -> np.ndarray | None:
        return np.roll(np.arange(tokens), 40) if layout.reordered else None

    with ChunkStore.open(folder) as store:
        ingest(store, TOKENS[:PARENT], layout=layout, order=order(PARENT))
        prefix = ingest(store, TOKENS, layout=layout, order=order(len(TOKENS) - PARENT))
    assert len(prefix.spans) == 2
    return prefix


def damage(folder: Path, prefix: Prefix, kind: str, span: int, chunks: Sequence[int]) -> None:
    """Flip a bit of a segment's manifest, digest or probe, or of packs of its first group."""
    segment = segment_folder(folder, prefix, span)
    if kind == "packs":
        for chunk in chunks:
            hurt(min(segment.glob("packs/c.*")), chunk * prefix.layout.pack_bytes + 3)
    elif kind in ("digest", "probe"):
        hurt(min(segment.glob(f"{kind}/c.*")), 3)
    else:
        hurt(segment / "manifest.json", 40)


DAMAGES: dict[str, list[tuple[str, int, Sequence[int]]]] = {
    "parent's manifest": [("manifest", 0, ())],
    "parent's first pack": [("packs", 0, [0])],
    "parent's later run": [("packs", 0, [HERE + 2])],
    "all of the parent": [("packs", 0, range(PARENT // 16))],
    "parent's digest": [("digest", 0, ())],
    "parent's digest and later run": [("digest", 0, ()), ("packs", 0, [HERE + 2])],
    "parent's probe and later run": [("probe", 0, ()), ("packs", 0, [HERE + 2])],
    "child's pack": [("packs", 1, [3])],
    "both": [("packs", 0, [HERE + 2]), ("packs", 1, [0])],
    "parent's manifest, child's pack": [("manifest", 0, ()), ("packs", 1, [3])],
}
"""Of each: what is hurt, of which segment, and which chunks."""


def outcome(folder: Path, prefix: Prefix) -> tuple[dict[str, str], dict[str, str]]:
    """Of each segment what a repair would do, and what it does."""
    ids = {"parent": prefix.spans[0].segment_id, "child": prefix.spans[1].segment_id}
    with ChunkStore.open(folder) as store:
        lines = dict(line.split(": ", 1) for line in planned_repairs(store, verify_store(store)))
        told = {name: lines.get(id_, "") for name, id_ in ids.items()}
        report = verify_store(store, repair=True)
        done = {}
        for span, (name, id_) in enumerate(ids.items()):
            found = store.index.find(id_)
            if found is None:
                assert id_ in report.removed
                assert not segment_folder(folder, prefix, span).exists()
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


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize(
    ("layout", "hurts"),
    [("position", name) for name in DAMAGES if name != "all of the parent"]
    + [("reordered", "all of the parent"), ("reordered", "parent's later run")]
    + [("alike", name) for name in ("parent's later run", "parent's digest", "both")],
)
def test_what_would_be_done_is_done(folder: Path, layout: str, hurts: str) -> None:
    text = made(folder, LAYOUTS[layout])
    for one in DAMAGES[hurts]:
        damage(folder, text, *one)
    told, done = outcome(folder, text)
    assert told == done and any(done.values())
    if hurts.startswith(("parent's manifest", "all")):
        assert set(done.values()) == {"be removed"}
    if hurts == "parent's digest":
        assert "be repaired" in done["parent"] and not done["child"]
    if hurts == "parent's probe and later run":
        assert "be limited to its first" in done["parent"]
    if hurts == "parent's later run":
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


def test_a_repair_keeps_what_was_replaced_while_it_checked(folder: Path) -> None:
    """Neither the replacement nor what continues it goes, and pins stay."""
    prefix = made(folder, POSITION)
    with ChunkStore.open(folder) as store, ChunkStore.open(folder) as other:
        damage(folder, prefix, "manifest", 0, ())

        def replace(_done: int, _total: int) -> None:
            parent = ingest(other, TOKENS[:PARENT], layout=POSITION)
            assert parent.num_tokens == PARENT
            pin_prefix(other, parent.id)

        report = verify_store(store, repair=True, progress=replace)
        assert report.damages and not report.removed and not report.quarantined
        (record,) = store.records().values()
        assert record.pinned
        for reader in (store, other):
            found = find(reader, TOKENS, POSITION)
            assert found.num_tokens == len(TOKENS)
            assert read_all(reader, found).refused == 0
        assert verify_store(store).ok


def test_a_repair_keeps_what_is_replaced_as_it_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last look at what is damaged."""
    with ChunkStore.open(folder) as store, ChunkStore.open(folder) as other:
        prefix, links = ingest(store, TOKENS), store.index.catalog.links
        damage(folder, prefix, "manifest", 0, ())

        def late(ids: Iterable[str]) -> set[bytes]:
            ingest(other, TOKENS)
            return links(ids)

        with monkeypatch.context() as patch:
            patch.setattr(store.index.catalog, "links", late)
            report = verify_store(store, repair=True)
        assert report.damages and not report.removed
        assert read_all(store, find(store, TOKENS, SMALL)).right == SMALL.groups * len(TOKENS) // 16
        assert verify_store(store).ok and not list((folder / "tmp").iterdir())


def test_a_repair_removes_nothing_while_it_cannot_look_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = made(folder, POSITION)
    damage(folder, prefix, "manifest", 0, ())
    with ChunkStore.open(folder) as store:
        real = type(store.files).manifest

        def fails(_done: int, _total: int) -> None:
            late = Mock(side_effect=StoreUnavailable("not now"))
            monkeypatch.setattr(type(store.files), "manifest", late)

        report = verify_store(store, repair=True, progress=fails)
        assert report.damages and not report.removed
        monkeypatch.setattr(type(store.files), "manifest", real)
        assert len(verify_store(store, repair=True).removed) == 2
