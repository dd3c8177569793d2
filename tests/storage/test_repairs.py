"""What becomes of a damaged segment, what is said of it, and what an inspection adds up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from segment_support import ALIKE, find, hurt, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Layout,
    SegmentDamaged,
    StoreConfig,
    StoreError,
    StoreUnavailable,
    Wish,
    inspect_store,
    pin_prefix,
    prune_store,
    verify_store,
    wish_for,
)
from ckv_jax.storage.segment.manifest import Manifest, draft_manifest
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.tools import inspect as inspecting
from ckv_jax.storage.tools.damage import (
    Damage,
    Fate,
    VerifyReport,
    by_segment,
    fate,
    foretold,
    losses,
    ranges,
)
from ckv_jax.storage.tools.inspect import importance_map
from ckv_jax.storage.tools.verify import _orphans
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, some_tokens

CHUNKS = 20


def manifest(layout: Layout = SMALL) -> Manifest:
    return draft_manifest(
        layout=layout, fingerprint=FINGERPRINT, tenant="", provenance="exact",
        tokens=some_tokens(16 * CHUNKS), start=bytes(16), parent=None, first_chunk=0,
        order=np.arange(16 * CHUNKS) if layout.reordered else None,
    )  # fmt: skip


def bad(chunk: int, kind: str = "packs") -> Damage:
    return Damage("x", chunk, f"{kind} {chunk}", kind)


def test_a_segment_is_of_use_up_to_the_first_chunk_that_stays_bad() -> None:
    found = [bad(7), bad(3), bad(9)]
    assert fate(manifest(), found, found, True) == Fate(3, 3, False, "packs 3")
    first = [bad(0)]
    lost = fate(manifest(), first, first, True)
    assert lost == Fate(0, 0, False, "packs 0") and lost.removed
    whole = fate(manifest(), found, [], True)
    assert whole == Fate(CHUNKS, CHUNKS, False, "") and not whole.removed
    last = [bad(CHUNKS - 1)]
    assert fate(manifest(), last, last, True).served == CHUNKS - 1


def test_without_a_manifest_nothing_is() -> None:
    for tried in (True, False):
        lost = fate(None, [bad(5)], [bad(5)], tried)
        assert lost == Fate(0, 0, False, "packs 5") and lost.removed
    assert foretold(None, [bad(5)]) == Fate(0, 0, False, "packs 5")
    assert not fate(None, [], [], True).removed


def test_what_follows_from_packs_may_be_made_another_time() -> None:
    probe, digest = bad(4, "probe"), bad(0, "digest")
    for left in ([probe], [digest], [probe, digest]):
        kept = fate(manifest(), left, left, True)  # it was tried, and no pack is torn
        assert kept.kept and not kept.removed and kept.usable == min(d.chunk for d in left)
        assert fate(manifest(), left, left, False).kept  # it could not be tried
    both = [bad(6), probe]
    assert not fate(manifest(), both, both, True).kept
    assert fate(manifest(), both, both, False).kept  # the probe comes before the pack
    after = [bad(4), bad(6, "probe")]
    assert not fate(manifest(), after, after, False).kept
    same = [bad(4), probe]
    assert not fate(manifest(), same, same, False).kept


def test_no_ingest_writes_into_what_cannot_be_opened() -> None:
    for kind in ("segment", "parent"):
        left = [bad(0, kind), bad(4, "probe")]
        for layout in (SMALL, ALIKE):
            lost = fate(manifest(layout), left, left, False)
            assert lost == Fate(0, 0, False, f"{kind} 0") and lost.removed


def test_alike_tokens_wait_for_an_ingest_unless_every_chunk_is_torn() -> None:
    some = [bad(chunk) for chunk in range(CHUNKS - 1)]
    every = [*some, bad(CHUNKS - 1)]
    assert fate(manifest(ALIKE), some, some, True).kept
    assert not fate(manifest(ALIKE), every, every, True).kept
    assert fate(manifest(ALIKE), every, every, True).removed
    twice = [*some, bad(0)]
    assert fate(manifest(ALIKE), twice, twice, True).kept
    probes = [bad(chunk, "assignment") for chunk in range(CHUNKS)]
    assert fate(manifest(ALIKE), probes, probes, True).kept


def test_a_repair_is_foretold_by_what_packs_are_there_to_make_it_from() -> None:
    probe, digest, pack = bad(4, "probe"), bad(0, "digest"), bad(6)
    assert foretold(manifest(), [probe, digest]) == Fate(CHUNKS, CHUNKS, False, "")
    assert foretold(manifest(), [probe, pack]) == Fate(6, 6, False, "packs 6")
    assert foretold(manifest(), [digest, pack]).why == "digest 0"
    assert foretold(manifest(), [bad(6, "probe"), bad(6), bad(7)]).usable == 6
    assert foretold(manifest(), [bad(0, "segment")]).removed
    coded = dataclasses.replace(SMALL, codec="unknown:1", codec_bytes=512)
    kept = foretold(manifest(coded), [probe])  # nobody here can read its packs
    assert kept.kept and kept.why == "probe 4" and kept.usable == 4
    ordered = dataclasses.replace(SMALL, reordered=True)
    assert foretold(manifest(ordered), [pack]).removed  # it is used whole


def test_findings_are_put_together_by_segment() -> None:
    one, two = Damage("a", 1, "x"), Damage("b", 1, "y", "probe")
    assert by_segment([one, two, one]) == {"a": [one, one], "b": [two]}
    assert one.kind == "packs" and ranges([]) == []
    most = [Damage("a", 2 * chunk, "torn") for chunk in range(8)]
    assert ranges(most) == ["a, 8 chunks: 0, 2, 4, 6, 8, 10, 12, 14: torn"]
    assert ranges([*most, Damage("a", 99, "torn")])[0].endswith("14 and 1 more runs: torn")
    pair = [Damage("a", 5, "torn"), Damage("a", 6, "torn")]
    assert ranges(pair) == ["a, 2 chunks: 5 to 6: torn"]


def test_a_report_counts_from_nothing() -> None:
    report = VerifyReport()
    assert report.to_dict() == {
        "ok": True, "segments": 0, "packs": 0, "bytes": 0, "swept": 0,
        "damages": [], "unread": [], "foreign": [], "unfinished": [], "unindexed": [],
        "remade": [], "unrepaired": [], "removed": [], "quarantined": [], "pardoned": [],
    }  # fmt: skip
    for name in ("foreign", "unfinished", "remade", "removed", "pardoned"):
        assert VerifyReport(**{name: ["x"]}).ok  # told, and nothing that is not as it was written


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
        store.set_wish(two.id, Wish(begins="once upon"))
        store.set_wish(one.id, Wish(begins="first", name="named"))
        assert sorted(losses(store, verify_store(store))) == sorted(
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
        (line,) = losses(store, VerifyReport(damages=[Damage(id_, chunk, "x", kind)]))
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
            patch.setattr(ChunkStore, "remake_probes", fails)
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
    ("name", "kind"), [("read_packs", "packs"), ("read_probe", "probe"), ("read_digest", "digest")]
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
                {"a": a, "b": b, "c": c}[name]: Fate(usable, usable, kept, "why")
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
        store.set_wish(leaf.id, Wish(name="n", source="s", begins="b"))
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


def test_an_inspection_passes_over_what_it_cannot_use(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefixes = {
            prefix.spans[0].segment_id: prefix
            for prefix in (ingest(store, some_tokens(16, seed)) for seed in range(3))
        }
        first = store.index.catalog.entries()[0].id
        hurt(segment_folder(folder, prefixes[first]) / "manifest.json", 40)
    with ChunkStore.open(folder, readonly=True) as store:
        found = inspect_store(store)
    assert {s.id for s in found.segments} == prefixes.keys() - {first}
    assert list(found.unusable) == [first]


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


def test_packs_that_cannot_be_read_are_counted_and_left_out(folder: Path) -> None:
    tokens = some_tokens(16 * 4)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens)
        path = sorted(segment_folder(folder, prefix).glob("packs/c.0.*"))[0]
        hurt(path, 3 * SMALL.pack_bytes + 1)
        info = inspect_store(store, prefix.id).prefix
    assert info is not None and info.bad_packs == 1
    kv = kv_of(SMALL, tokens).astype(np.float32)
    assert info.layers[0].key_max == kv[0, 0, :48].max()
    assert info.layers[2].key_max == kv[2, 0].max()


def test_importance_is_that_of_the_chunks_of_each_span(store: ChunkStore) -> None:
    tokens = some_tokens(16 * 7)
    ingest(store, tokens[: 16 * 4])
    prefix = ingest(store, tokens)
    assert importance_map(store, prefix) is None
    scores = np.arange(SMALL.groups * 3).reshape(SMALL.groups, 3) + 1.0
    store.save_scores(prefix.spans[1].segment_id, scores, np.ones(scores.shape))
    found = importance_map(store, prefix)
    assert found is not None and found.dtype == np.float32
    np.testing.assert_array_equal(found[:, 4:], scores)
    assert not found[:, :4].any()
    info = inspect_store(store, prefix.id).prefix
    assert info is not None and info.importance == [0.0] * 4 + scores.mean(0).tolist()
    cut = store.prefix(store.longest_prefix(
        tokens[: 16 * 6], fingerprint=FINGERPRINT, layout=SMALL
    ).id)  # fmt: skip
    part = importance_map(store, cut)
    assert part is not None
    np.testing.assert_array_equal(part[:, 4:], scores[:, :2])
    assert json.dumps(inspect_store(store, prefix.id).to_dict())


# -- upkeep ------------------------------------------------------------------------------------


def test_pruning_tells_bytes_before_and_after(store: ChunkStore) -> None:
    prefixes = [ingest(store, some_tokens(64, seed)) for seed in range(3)]
    before = store.usage()
    wish_for(store, prefixes[2].id, retain_s=0.0)
    report = prune_store(store, expired=True)
    assert (report.bytes_before, report.bytes_after, report.removed) == (
        before, store.usage(), 1,
    )  # fmt: skip
    assert report.bytes_after < before
    report = prune_store(store, 0, expired=True)
    assert (report.bytes_after, report.removed) == (0, 2)
    assert prune_store(store, 0).removed == 0
    for wrong in ({}, {"max_bytes": None}, {"max_bytes": -1}, {"max_bytes": -1, "expired": True}):
        with pytest.raises(ValueError, match="max_bytes: got"):
            prune_store(store, **wrong)  # type: ignore[arg-type]


def test_a_wish_changes_what_was_said_of_it_alone(store: ChunkStore) -> None:
    prefix = ingest(store, some_tokens(64))
    assert wish_for(store, prefix.id[:8], retain_s=5.0) == prefix.id
    assert wish_for(store, prefix.id, priority=2) == prefix.id
    assert pin_prefix(store, prefix.id) == prefix.id
    assert store.wishes() == {prefix.id: Wish(pinned=True, retain_s=5.0, priority=2)}
    pin_prefix(store, prefix.id, pinned=False)
    wish_for(store, prefix.id, priority=0)
    assert store.wishes() == {prefix.id: Wish(retain_s=5.0)}
