"""What becomes of a damaged segment, what is said of it, and what an inspection adds up."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from segment_support import ALIKE, find, hurt, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    Prefix,
    PrefixRecord,
    SegmentDamaged,
    StoreConfig,
    StoreError,
    StoreUnavailable,
    inspect_store,
    pin_prefix,
    update_record,
    verify_store,
)
from ckv_jax.storage.layout import RUN
from ckv_jax.storage.segment.manifest import Manifest, draft_manifest
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.segment import Segment
from ckv_jax.storage.tools import inspect as inspecting
from ckv_jax.storage.tools.verify import (
    Damage,
    RepairOutcome,
    VerifyReport,
    _orphans,
    planned_repairs,
)
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, read_all, some_tokens

CHUNKS = 20


def manifest(layout: Layout = SMALL) -> Manifest:
    return draft_manifest(
        layout=layout, fingerprint=FINGERPRINT, tenant="", provenance="exact",
        tokens=some_tokens(16 * CHUNKS), start=bytes(16), parent=None, first_chunk=0,
        order=np.arange(16 * CHUNKS) if layout.reordered else None,
    )  # fmt: skip


def bad(chunk: int, kind: str = "packs") -> Damage:
    return Damage("x", chunk, f"{kind} {chunk}", kind)


def test_a_check_adds_up_packs_bytes_and_damages(folder: Path) -> None:
    layout = dataclasses.replace(SMALL, digest="int8")
    with ChunkStore.open(folder) as store:
        one, two = (ingest(store, some_tokens(70, seed), layout=layout) for seed in (0, 1))
        steps: list[tuple[int, int]] = []
        report = verify_store(store, progress=lambda *step: steps.append(step))
        assert (report.segments, report.packs, report.ok) == (2, 2 * 5 * layout.groups, True)
        sizes = {e.id: e.bytes for e in store.index.catalog.entries()}
        first = sizes[min(sizes)]
        assert steps == [(first, report.bytes), (report.bytes, report.bytes)]
        assert report.bytes == sum(sizes.values())
        hurt(sorted(segment_folder(folder, one).glob("packs/c.*"))[0], 3)
        hurt(sorted(segment_folder(folder, one).glob("probe/c.*"))[0], 3)
        hurt(sorted(segment_folder(folder, two).glob("digest/c.*"))[0], 3)
        found = {(d.segment_id, d.kind, d.chunk) for d in verify_store(store).damages}
        ids = [prefix.spans[0].segment_id for prefix in (one, two)]
        assert found == {(ids[0], "packs", 0), (ids[0], "probe", 0), (ids[1], "digest", 0)}
        store.set_record(two.id, PrefixRecord(begins="once upon"))
        store.set_record(one.id, PrefixRecord(begins="first", name="named"))
        assert sorted(planned_repairs(store, verify_store(store))) == sorted(
            [
                f"{ids[0]} (named): be removed",
                f"{ids[1]} (once upon): be made whole: what is damaged follows from its packs",
            ]
        )
        done = verify_store(store, repair=True)
        assert (done.removed, done.remade, done.unrepaired) == ([ids[0]], [ids[1]], [])
        why = store.why_evicted(one.id)
        assert why is not None and why.reason.startswith("repair: ")
        assert verify_store(store).ok and store.files.segment_ids() == {ids[1]}


def test_what_a_repair_would_do_is_told_of_each_segment(store: ChunkStore) -> None:
    plain, together = (ingest(store, some_tokens(64), layout=layout) for layout in (SMALL, ALIKE))
    one, other = (prefix.spans[0].segment_id for prefix in (plain, together))

    def told(id_: str, chunk: int, kind: str = "packs") -> str:
        (line,) = planned_repairs(store, VerifyReport(damages=[Damage(id_, chunk, "x", kind)]))
        assert line.startswith(f"{id_}: ")
        return line.removeprefix(f"{id_}: ")

    assert told(one, 2) == "be limited to its first 2 of 4 chunks"
    assert told(one, 0) == told("ab" * 16, 1) == told(other, 0, "segment") == "be removed"
    assert told(one, 1, "probe") == "be made whole: what is damaged follows from its packs"
    assert told(other, 0) == "be kept and not served, until its text is ingested again"


@pytest.mark.parametrize("error", [StoreUnavailable("busy"), SegmentDamaged("it is gone")])
def test_what_could_not_be_made_anew_now_is_kept_and_what_went_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    """Somebody else is mending it, or has removed it."""
    tokens = some_tokens(64)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens)
        (id_,) = (span.segment_id for span in prefix.spans)
        chunk_bytes = SMALL.probe_heads * SMALL.head_dim * 2 * 16
        hurt(sorted(segment_folder(folder, prefix).glob("probe/c.*"))[0], 2 * chunk_bytes)

        def fails(*_: object, **__: object) -> int:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(ChunkStore, "rebuild_probes", fails)
            report = verify_store(store, repair=True)
        kinds = [(d.kind, d.chunk, d.what) for d in report.damages]
        assert kinds[0][:2] == ("probe", 2)
        if isinstance(error, SegmentDamaged):
            assert kinds[1:] == [("segment", 0, "it is gone")]
            assert (report.removed, report.unrepaired, report.quarantined) == ([id_], [], [])
        else:
            assert len(kinds) == 1 and not report.removed and not report.remade
            assert report.unrepaired == report.quarantined == [id_]
            assert find(store, tokens, SMALL).num_tokens == 32
            assert verify_store(store, repair=True).remade == [id_]
            assert find(store, tokens, SMALL).num_tokens == 64


@pytest.mark.parametrize(
    ("name", "kind"),
    [("read_packs", "packs"), ("read_probe_pages", "probe"), ("read_digest", "digest")],
)
def test_what_cannot_be_read_now_is_told_and_not_damage(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    layout = dataclasses.replace(SMALL, digest="int8")
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


def test_what_continues_something_that_goes_goes_too(folder: Path) -> None:
    """From where its parent will not be there up to its start; not what leads through unknown."""
    tokens = some_tokens(16 * 9)
    with ChunkStore.open(folder) as store:
        ingest(store, tokens[: 16 * 3])
        ingest(store, tokens[: 16 * 6])
        spans = ingest(store, tokens).spans
        a, b, c = (span.segment_id for span in spans)
        segments = {id_: store.index.find(id_) for id_ in (a, b, c)}
        assert all(segments.values())

        def orphans(unknown: tuple[str, ...] = (), **fates: tuple[int, bool]) -> list[str]:
            known = {
                {"a": a, "b": b, "c": c}[name]: RepairOutcome(usable, usable, kept, "why")
                for name, (usable, kept) in fates.items()
            }
            return _orphans(segments, known, set(unknown))  # type: ignore[arg-type]

        assert orphans() == orphans(a=(3, False)) == orphans(a=(0, True)) == []
        assert orphans(a=(2, False)) == [b, c] and orphans(b=(2, False)) == [c]
        assert orphans(b=(3, False)) == orphans(c=(0, False)) == []
        assert orphans((a,), a=(2, False)) == [] and orphans((b,), a=(2, False)) == [b]
        del segments[a]
        assert orphans() == [b, c] and orphans((a,)) == []


# -- inspection --------------------------------------------------------------------------------


def test_an_inspection_says_of_each_segment_what_its_manifest_does(folder: Path) -> None:
    tokens = some_tokens(16 * 6 + 5)
    with ChunkStore.open(folder, config=StoreConfig(max_bytes=1 << 24)) as store:
        root = ingest(store, tokens[: 16 * 4])
        leaf = ingest(store, tokens)
        pin_prefix(store, root.id)
        store.set_record(leaf.id, PrefixRecord(name="n", source="s", begins="b"))
        shape = (SMALL.groups, 4)
        store.save_scores(root.spans[0].segment_id, np.full(shape, 0.5), np.full(shape, 4))
        store.index.quarantine(root.spans[0].segment_id, root.spans[0].checksum, 3, "bad")
        found = inspect_store(store)
        one, two = found.segments
        assert (one.id, one.parent, two.parent) == (root.spans[0].segment_id, None, one.id)
        assert [(s.first_chunk, s.chunks, s.tokens, s.usable_chunks) for s in (one, two)] == [
            (0, 4, 64, 3), (4, 3, 37, 3),
        ]  # fmt: skip
        assert (one.prefix_id, two.prefix_id) == (root.id, leaf.id)
        assert (one.pinned, two.pinned) == (True, False) and not one.salted
        assert (one.score, two.score) == (2.0, None)
        assert (two.name, two.source, two.begins, one.name) == ("n", "s", "b", "")
        assert one.layout == SMALL.to_dict() and one.fingerprint == dict(FINGERPRINT.fields)
        assert found.max_bytes == 1 << 24 and found.unusable == {}
        assert found.children(one.id) == [two] and found.children(two.id) == []
        assert one.created <= two.created and one.last_used >= one.created
        (folder / "segments" / "ab" / ("ab" * 16)).mkdir(parents=True)
        unusable = inspect_store(store).unusable
        assert list(unusable) == ["ab" * 16] and "no manifest" in unusable["ab" * 16]


@pytest.mark.parametrize("pieces", [1, 1 << 25])
@pytest.mark.parametrize("layout", [
    SMALL,
    dataclasses.replace(SMALL, pack_layers=4, num_layers=6),
    dataclasses.replace(SMALL, pack_layers=1, kv_together=False),
    dataclasses.replace(SMALL, pack_layers=2, heads_apart=True),
], ids=["packs of 2", "packs of 4", "K and V apart", "heads apart"])  # fmt: skip
def test_statistics_are_of_every_finite_number_once(
    store: ChunkStore, layout: Layout, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens that are there alone, in pieces of any size."""
    monkeypatch.setattr(inspecting, "_PIECE_BYTES", pieces)
    tokens = some_tokens(16 * 4 + 3)
    prefix = ingest(store, tokens, layout=layout)
    info = inspect_store(store, prefix.id).prefix
    assert info is not None and (info.bad_packs, info.lost_orders) == (0, 0)
    assert (info.id, info.num_tokens, info.num_chunks) == (prefix.id, 67, 5)
    assert info.segments == [span.segment_id for span in prefix.spans]
    kv = kv_of(layout, tokens).astype(np.float32)
    assert [stats.layer for stats in info.layers] == list(range(layout.num_layers))
    for stats in info.layers:
        for kind, name in enumerate(("key", "value")):
            part = kv[stats.layer, kind]
            finite = part[np.isfinite(part)]
            assert getattr(stats, f"{name}_min") == finite.min()
            assert getattr(stats, f"{name}_max") == finite.max()
            mean = np.abs(finite).mean(dtype=np.float64)
            assert getattr(stats, f"{name}_mean_abs") == pytest.approx(mean, rel=1e-9)
        whole = kv[stats.layer]
        assert stats.nan == np.isnan(whole).sum() and stats.infinite == np.isinf(whole).sum()


# -- upkeep ------------------------------------------------------------------------------------


def test_a_wish_changes_what_was_said_of_it_alone(store: ChunkStore) -> None:
    prefix = ingest(store, some_tokens(64))
    assert update_record(store, prefix.id[:8], retain_s=5.0) == prefix.id
    assert update_record(store, prefix.id, priority=2) == prefix.id
    assert pin_prefix(store, prefix.id) == prefix.id
    assert store.records() == {prefix.id: PrefixRecord(pinned=True, retain_s=5.0, priority=2)}
    pin_prefix(store, prefix.id, pinned=False)
    update_record(store, prefix.id, priority=0)
    assert store.records() == {prefix.id: PrefixRecord(retain_s=5.0)}


# -- what a repair would do, and does ------------------------------------------------------------


POSITION = dataclasses.replace(SMALL, digest="int8")
LAYOUTS = {
    "alike": ALIKE,
    "position": POSITION,
    "reordered": dataclasses.replace(POSITION, reordered=True),
}
PARENT = RUN + 16 * 24
"""Tokens: a run and what a second one has."""
HERE = RUN // 16
"""The first chunk of the second run."""
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
    "parent's later run": pack(0, HERE + 5),
    "all of the parent": pack(0, *range(PARENT // 16)),
    "parent's digest": digest(0),
    "parent's digest and later run": both(digest(0), pack(0, HERE + 5)),
    "child's pack": pack(1, 3),
    "both": both(pack(0, HERE + 5), pack(1, 0)),
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
                done[name] = "be made whole: what is damaged follows from its packs"
            elif id_ not in report.quarantined:
                assert found.usable == found.manifest.chunks
                done[name] = ""
            elif id_ in report.unrepaired:
                done[name] = "be kept and not served, until its text is ingested again"
            else:
                whole, size = found.manifest.chunks, found.manifest.layout.chunk_tokens
                tokens = found.manifest.layout.cut(found.usable * size, len(found.manifest.tokens))
                done[name] = f"be limited to its first {tokens // size} of {whole} chunks"
    return told, done


def segment_there(folder: Path, id_: str) -> bool:
    return (folder / "segments" / id_[:2] / id_).exists()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Prefix]]:
    root = tmp_path_factory.mktemp("stores")
    return {name: (root / name, made(root / name, LAYOUTS[name])) for name in LAYOUTS}


@pytest.fixture(params=LAYOUTS)
def text(
    request: pytest.FixtureRequest, stores: dict[str, tuple[Path, Prefix]], folder: Path
) -> Prefix:
    """A text of two segments, stored in `folder`."""
    whole, prefix = stores[request.param]
    shutil.copytree(whole, folder)
    return prefix


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_would_be_done_is_done(folder: Path, text: Prefix, damage: str) -> None:
    DAMAGES[damage](folder, text)
    told, done = outcome(folder, text)
    assert told == done and any(done.values())
    if damage.startswith(("parent's manifest", "all")):
        assert set(done.values()) == {"be removed"}
    if damage == "parent's digest":
        assert "be made whole" in done["parent"] and not done["child"]
    if damage == "parent's later run":
        by_layout = {
            (True, False): f"be limited to its first {HERE} of {PARENT // 16} chunks",
            (False, False): f"be limited to its first {HERE + 5} of {PARENT // 16} chunks",
            (False, True): "be removed",
        }
        assert done["parent"] == by_layout[text.layout.alike, text.layout.reordered]


@pytest.mark.parametrize("which", [0, 1], ids=["parent", "child"])
def test_what_cannot_be_opened_is_removed_as_was_said(
    folder: Path, text: Prefix, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is away while it is opened, as if somebody removed it between."""
    path = segment_folder(folder, text, which) / "manifest.json"
    away, real = folder.parent / "away", ChunkStore.open_segment

    def gone(store: ChunkStore, found: object, checksum: str) -> Segment:
        mine = found.segment_id == text.spans[which].segment_id  # type: ignore[attr-defined]
        if mine:
            path.rename(away)
        try:
            return real(store, found, checksum)  # type: ignore[arg-type]
        finally:
            if mine:
                away.rename(path)

    monkeypatch.setattr(ChunkStore, "open_segment", gone)
    told, done = outcome(folder, text)
    assert told == done and done["child"] == "be removed"
    assert done["parent"] == ("" if which else "be removed")


@pytest.mark.parametrize("chunk", [0, HERE + 5])
def test_what_continues_alike_tokens_waits_for_the_next_ingest(
    folder: Path, stores: dict[str, tuple[Path, Prefix]], chunk: int
) -> None:
    """Whether some of the parent can be served or not: an ingest of its text makes both whole."""
    whole, prefix = stores["alike"]
    shutil.copytree(whole, folder)
    pack(0, chunk)(folder, prefix)
    with ChunkStore.open(folder) as store:
        assert not verify_store(store, repair=True).removed
        find = {"fingerprint": FINGERPRINT, "layout": ALIKE}
        marked = store.longest_prefix(TOKENS, marked=True, **find)  # type: ignore[arg-type]
        kv = kv_of(ALIKE, TOKENS[:PARENT])
        assert store.replace_packs(marked, 0, kv) == 1
        assert store.longest_prefix(TOKENS, **find) == prefix  # type: ignore[arg-type]
        assert verify_store(store).ok


def test_a_repair_keeps_the_chunks_before_a_bad_pack_when_their_probes_are_made_again(
    folder: Path,
) -> None:
    tokens = some_tokens(16 * CHUNKS)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens, layout=SMALL)
        hurt(next(segment_folder(folder, prefix).glob("probe/c.*")), 0)
        hurt(next(segment_folder(folder, prefix).glob("packs/c.0.*")), 5 * SMALL.pack_bytes)
        report = verify_store(store, repair=True)
        assert report.quarantined == [prefix.spans[0].segment_id] and not report.removed
        found = find(store, tokens, SMALL)
        assert found.num_tokens == 5 * 16 and read_all(store, found).refused == 0
