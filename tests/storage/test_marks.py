"""What is marked as bad, what is counted, and how far a marked segment is served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Prefix,
    PrefixNotFound,
    SegmentDamaged,
    StoreUnavailable,
)
from ckv_jax.storage.index import lookup
from ckv_jax.storage.index.index import Counters
from tests.support.truth import FINGERPRINT, SMALL, ingest, some_tokens

TOKENS = some_tokens(16 * 7)
COUNTED = ("bad_packs", "gone", "unread", "quarantined", "bad_manifests", "hits", "misses")


def counts(store: ChunkStore) -> dict[str, int]:
    """Those that are not 0."""
    found = store.stats()
    return {name: found[name] for name in COUNTED if found[name]}


def two_segments(store: ChunkStore) -> Prefix:
    """Of 3 chunks and 4."""
    ingest(store, TOKENS[: 16 * 3])
    prefix = ingest(store, TOKENS)
    assert len(prefix.spans) == 2
    return prefix


def test_counts_are_of_names_and_from_nothing() -> None:
    found = Counters()
    assert found["x"] == 0
    found.add("x")
    found.add("x", 4)
    found.add("y", 0)
    assert (found["x"], found["y"]) == (5, 0)


def test_what_could_not_be_read_is_counted_for_what_it_is(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (span,) = ingest(store, some_tokens(40)).spans
    segment = SimpleNamespace(id=span.segment_id, checksum=span.checksum)
    report = store.index.report
    before = counts(store)
    assert before == {"misses": 1}
    report(segment, 1, "late", False)  # type: ignore[arg-type]
    assert counts(store) == before | {"unread": 1}
    report(None, 1, "gone", True)
    assert counts(store) == before | {"unread": 1, "bad_packs": 1, "gone": 1}

    def unknown(_: str) -> None:
        raise StoreUnavailable("the disk has not answered")

    with monkeypatch.context() as patch:
        patch.setattr(store.files, "stamp", unknown)
        report(segment, 1, "torn", True)  # type: ignore[arg-type]
        assert counts(store) == before | {"unread": 1, "bad_packs": 2, "gone": 1}
        patch.setattr(store.files, "stamp", lambda _: None)
        report(segment, 1, "torn", True)  # type: ignore[arg-type]
        assert counts(store) == before | {"unread": 1, "bad_packs": 3, "gone": 2}
    assert find(store, some_tokens(40), SMALL).num_tokens == 40
    report(segment, 1, "torn", True)  # type: ignore[arg-type]
    assert store.stats()["quarantined"] == 1 and store.stats()["hits"] == 1
    assert find(store, some_tokens(40), SMALL).num_tokens == 16


def test_a_segment_is_served_up_to_its_first_mark(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = two_segments(store)
        first, second = prefix.spans
        assert store.marked_chunks(prefix).tolist() == []
        for chunk in (-1, 4, 99):  # which it does not have
            store.index.quarantine(second.segment_id, second.checksum, chunk, "x")
        assert find(store, TOKENS, SMALL) == prefix
        store.index.quarantine(second.segment_id, "0" * 64, 0, "another that was there")
        assert find(store, TOKENS, SMALL) == prefix
        for chunk in (3, 1):
            store.index.quarantine(second.segment_id, second.checksum, chunk, "x")
        assert find(store, TOKENS, SMALL).num_tokens == 16 * 4
    with ChunkStore.open(folder) as store:  # another process knows it
        assert find(store, TOKENS, SMALL).num_tokens == 16 * 4
        marked = find(store, TOKENS, SMALL, marked=True)
        assert marked == prefix and store.marked_chunks(marked).tolist() == [4, 6]
        assert store.marked_chunks(find(store, TOKENS[: 16 * 5], SMALL, marked=True)).tolist() == [
            4
        ]
        store.index.quarantine(first.segment_id, first.checksum, 2, "x")
        assert store.marked_chunks(prefix).tolist() == [2, 4, 6]
        assert find(store, TOKENS, SMALL).num_tokens == 16 * 2
        store.index.pardon(first.segment_id)
        assert store.marked_chunks(prefix).tolist() == [4, 6]
        store.index.pardon(second.segment_id)
        assert find(store, TOKENS, SMALL) == prefix
        assert store.prefixes() == [prefix]
    with ChunkStore.open(folder) as store:
        assert find(store, TOKENS, SMALL) == prefix


def test_marks_of_a_manifest_that_was_replaced_are_of_nothing(store: ChunkStore) -> None:
    prefix = two_segments(store)
    second = prefix.spans[1]
    manifest = store.index.manifest(second.segment_id, second.checksum)
    assert manifest.segment_id == second.segment_id
    with pytest.raises(SegmentDamaged, match="replaced"):
        store.index.manifest(second.segment_id, "0" * 64)
    store.index.quarantine(second.segment_id, second.checksum, 1, "x")
    store.index.add(manifest, second.checksum)  # the same one: what was bad is bad
    assert store.index.marks(manifest, second.checksum) == {1}
    store.index.add(manifest, "0" * 64)  # another in its place
    assert store.index.marks(manifest, second.checksum) == set()
    store.index.quarantine(second.segment_id, second.checksum, 1, "x")
    store.index.drop(second.segment_id, "removed")
    assert store.index.marks(manifest, second.checksum) == set()


def test_prefixes_are_told_to_their_tenant_and_in_the_order_of_their_ids(
    store: ChunkStore,
) -> None:
    mine = [ingest(store, some_tokens(20, seed), salt="a") for seed in range(3)]
    public = [ingest(store, some_tokens(20, seed)) for seed in range(3)]
    assert [p.id for p in store.prefixes()] == sorted(p.id for p in mine + public)
    assert [p.id for p in store.prefixes(salt="a")] == sorted(p.id for p in mine)
    assert [p.id for p in store.prefixes(salt="")] == sorted(p.id for p in public)
    assert store.prefixes(salt="b") == []
    for prefix, salt, other in ((mine[0], "a", ""), (public[0], "", "a")):
        assert store.prefix(prefix.id[:12], salt=salt) == prefix
        with pytest.raises(PrefixNotFound):
            store.prefix(prefix.id[:12], salt=other)


def test_manifests_that_cannot_be_used_are_counted(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefixes = [ingest(store, some_tokens(20, seed)) for seed in range(3)]
    for prefix in prefixes[:2]:
        hurt(segment_folder(folder, prefix) / "manifest.json", 60)
    (folder / "catalog.sqlite").unlink()
    with ChunkStore.open(folder) as store:
        assert store.stats()["bad_manifests"] >= 2 and store.stats()["unread"] == 0
        assert store.prefixes() == prefixes[2:] and store.index.unknown() == set()
        assert store.index.find(prefixes[0].spans[0].segment_id) is None
        assert store.index.load_marked(prefixes[0].spans[0].segment_id) is None
        ids = [prefix.spans[0].segment_id for prefix in prefixes]
        told = list(store.index.manifests([ids[0], "ab" * 16, ids[2]]))
        assert [(id_, checksum, size) for id_, _, checksum, size in told] == [
            (ids[0], "", 0), ("ab" * 16, "", 0),
            (ids[2], prefixes[2].spans[0].checksum, store.usage()),
        ]  # fmt: skip
        assert [isinstance(found, SegmentDamaged) for _, found, *_ in told] == [True, True, False]


def test_hits_and_misses_are_counted(store: ChunkStore) -> None:
    prefix = ingest(store, some_tokens(40))
    other = store.longest_prefix(some_tokens(40, 1), fingerprint=FINGERPRINT, layout=SMALL)
    assert other.num_tokens == 0 and counts(store) == {"misses": 2}
    assert find(store, some_tokens(40), SMALL) == prefix and counts(store)["hits"] == 1


def asked(prefix_id: str, ends: list[str]) -> PrefixNotFound:
    """What is said of an id where segments end with `ends`, none of which can be read."""
    catalog = SimpleNamespace(
        ends=lambda _: ends, ending_with=lambda *_: [], passing=lambda *_: []
    )  # fmt: skip
    with pytest.raises(PrefixNotFound) as error:
        lookup.by_id(prefix_id, salt=None, catalog=catalog, load=lambda _: None)  # type: ignore[arg-type]
    return error.value


def test_ids_that_are_close_are_those_that_begin_so_and_a_few_that_look_so() -> None:
    many = [f"abcdef{n:026x}" for n in range(7)]
    assert asked("abcdef" + "0" * 25 + "9", many[::-1]).close == tuple(many[:5])
    near = "abcde0" + many[2][6:]  # of which no other begins so
    assert set(asked(near, many).close) < set(many) and len(asked(near, many).close) == 3
    assert asked(near, many).close[0] == many[2]
    for other in ("9" * 32, "", "zz"):
        assert asked(other, many).close == ()
    several = asked("abcd", many)
    assert (several.several, several.close) == (7, tuple(many[:5]))
    assert asked(many[0][:-1], [many[0]]).several == 0
