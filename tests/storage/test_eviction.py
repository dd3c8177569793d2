"""Who leaves a full store first, what people may wish of a prefix, and rows that are believed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, StoreConfig, StoreUnavailable, Wish, chain
from ckv_jax.storage.index import catalog as rows
from ckv_jax.storage.index.bounds import Bounds, Plan
from ckv_jax.storage.index.catalog import Catalog, Entry, Eviction
from ckv_jax.storage.index.wishes import first_words
from ckv_jax.storage.segment.manifest import Manifest, draft_manifest
from tests.support.truth import FINGERPRINT, SMALL, ingest, read_all, some_tokens

NOW = 1000.0


class Claims:
    """Who has taken which segment."""

    def __init__(self, busy: Iterable[str] = ()) -> None:
        self.busy, self.taken = set(busy), []

    def __call__(self, id_: str) -> SimpleNamespace | None:
        if id_ in self.busy:
            return None
        self.taken.append(id_)
        return SimpleNamespace(release=lambda: self.taken.remove(id_))


def entry(
    id_: str,
    parent: str | None = None,
    *,
    size: int = 10,
    used: float = 0.0,
    score: float | None = None,
    tenant: str = "",
) -> Entry:
    return Entry(id_, parent, size, used, score, tenant)


def plan_of(
    *entries: Entry,
    policy: str = "attention",
    keep: Iterable[str] = (),
    wishes: dict[str, Wish] | None = None,
    claim: Callable[[str], object] | None = None,
) -> Plan:
    return Plan(
        entries, policy=policy, keep=set(keep), wishes=wishes or {},
        claim=claim or Claims(), now=NOW,  # type: ignore[arg-type]
    )  # fmt: skip


def order(plan: Plan, excess: float = math.inf) -> list[str]:
    plan.take(excess)
    return [victim.id for victim, _, _ in plan.victims]


def test_no_more_is_taken_than_gives_the_room() -> None:
    some = [entry(id_, used=place) for place, id_ in enumerate("abcd")]
    for excess, freed in ((0, 0), (-5, 0), (1, 10), (10, 10), (11, 20), (99, 40)):
        plan = plan_of(*some)
        assert plan.take(excess) == freed and len(plan.victims) == freed // 10


def test_what_was_never_read_counts_as_the_average_of_what_was() -> None:
    some = [entry("a", score=4.0), entry("b"), entry("c", score=1.0), entry("d", score=3.0)]
    assert order(plan_of(*some)) == ["c", "b", "d", "a"]  # 1, 8/3, 3, 4


def test_ties_and_lru_go_by_time_of_use_and_then_by_id() -> None:
    some = [
        entry("a", used=3, score=1.0), entry("b", used=1, score=9.0), entry("c", used=2, score=1.0),
        entry("d", used=1, score=9.0),
    ]  # fmt: skip
    assert order(plan_of(*some)) == ["c", "a", "b", "d"]
    assert order(plan_of(*some, policy="lru")) == ["b", "d", "c", "a"]


def test_expired_ones_go_before_priority_and_priority_before_score() -> None:
    some = [entry(id_, used=NOW - 50, score=9.0 - n) for n, id_ in enumerate("abcd")]
    wishes = {
        "a": Wish(retain_s=50.0, priority=9),  # expired at this very moment
        "b": Wish(priority=-1),
        "c": Wish(retain_s=50.1),
    }
    plan = plan_of(*some, wishes=wishes)
    assert order(plan) == ["a", "b", "d", "c"]
    assert [why for _, _, why in plan.victims] == [
        "expired: unused for 50 s, retain_s=50",
        "score 8, priority -1, unused for 50 s (attention)",
        "score 6, priority 0, unused for 50 s (attention)",
        "score 7, priority 0, unused for 50 s (attention)",
    ]
    late = plan_of(*some, wishes=wishes)
    assert [late.expired(e) for e in some] == [True, False, False, False]
    ahead = plan_of(entry("x", used=NOW + 5))
    ahead.take(1)
    assert ahead.victims[0][2] == "never read, priority 0, unused for 0 s (attention)"


def test_a_segment_goes_after_all_that_continue_it() -> None:
    tree = [
        entry("root", score=0.0), entry("left", "root", score=5.0),
        entry("right", "root", score=6.0), entry("leaf", "left", score=7.0),
        entry("alone", "gone", score=6.5),
    ]  # fmt: skip
    assert order(plan_of(*tree)) == ["right", "alone", "leaf", "left", "root"]
    assert order(plan_of(*tree, keep=["left"])) == ["right", "alone", "leaf"]
    assert order(plan_of(*tree, claim=Claims(["leaf"]))) == ["right", "alone"]


def test_only_what_fits_goes_also_of_what_stands_under_it() -> None:
    tree = [
        entry("a", tenant="x"), entry("b", "a", tenant="x"), entry("c", tenant="y"),
        entry("d", "c", tenant="x"),
    ]  # fmt: skip
    plan = plan_of(*tree)
    assert plan.take(math.inf, lambda e: e.tenant == "x") == 30
    assert [victim.id for victim, _, _ in plan.victims] == ["b", "a", "d"]
    assert plan.take(math.inf) == 10 and plan.victims[-1][0].id == "c"  # goes on from there


def test_what_was_claimed_is_let_go_again() -> None:
    claims = Claims()
    plan = plan_of(entry("a"), entry("b"), claim=claims)
    plan.take(11)
    assert claims.taken == ["a", "b"]
    plan.drop()
    assert claims.taken == [] and not plan.victims

    def fails(id_: str) -> object:
        if id_ == "b":
            raise StoreUnavailable("the disk has not answered")
        return claims(id_)

    plan = plan_of(entry("a"), entry("b"), claim=fails)
    with pytest.raises(StoreUnavailable):
        plan.take(11)
    assert claims.taken == [] and not plan.victims


@pytest.mark.parametrize(
    "right",
    [
        {"retain_s": 0}, {"retain_s": 0.5}, {"priority": 1000}, {"priority": -1000},
        {"name": "x" * 200}, {"source": "a b"}, {"begins": "ü …"},
    ],
    ids=str,
)  # fmt: skip
def test_a_wish_is_kept_as_it_was_made(right: dict[str, object]) -> None:
    wish = Wish(**right)  # type: ignore[arg-type]
    data = wish.encode()
    assert data is not None and Wish.decode(data) == wish and wish != Wish()


@pytest.mark.parametrize(
    "wrong",
    [
        {"pinned": 1}, {"pinned": None}, {"retain_s": math.inf}, {"retain_s": math.nan},
        {"retain_s": True}, {"retain_s": -0.1}, {"priority": -1001}, {"priority": True},
        {"name": "x" * 201}, {"name": "a\tb"}, {"source": None}, {"begins": b"x"},
    ],
    ids=str,
)  # fmt: skip
def test_what_nobody_can_wish_is_refused(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}: got"):
        Wish(**wrong)  # type: ignore[arg-type]


def test_no_wish_is_no_file_and_one_without_names_is_an_older_one() -> None:
    assert Wish().encode() is None
    assert (Wish().pinned, Wish().retain_s, Wish().priority) == (False, None, 0)
    older = json.dumps({"pinned": False, "retain_s": 7.5, "priority": 3}).encode()
    assert Wish.decode(older) == Wish(retain_s=7.5, priority=3)
    for data in (b'{"pinned": false}', b"[" * 100_000, b"null", b'{"pinned": 3}', b""):
        assert Wish.decode(data) == Wish(pinned=True)


def test_first_words_are_cut_between_words() -> None:
    assert first_words("  one\ntwo\tthree ") == "one two three"
    assert first_words("one two three", 13) == "one two three"
    assert first_words("one two three", 12) == "one two …"
    assert first_words("abcdefgh", 5) == "abcde …"
    assert first_words("a\x07b") == "a b"
    assert first_words("x" * 60) == "x" * 60 and first_words("x" * 61) == "x" * 60 + " …"


ROW = ("id", "parent", 7, 1.5, 0.5, "tenant")


def test_rows_that_a_damaged_file_may_hold_are_not_believed() -> None:
    assert rows._sane(ROW) and rows._sane(("id", None, 7, 1.5, None, ""))
    for place, bad in enumerate((None, 3, "7", 1, "0.5", None)):
        assert not rows._sane((*ROW[:place], bad, *ROW[place + 1 :])), place


def test_evictions_that_a_damaged_file_may_hold_are_not_told() -> None:
    good = ("prefix", 5.0, 7, "why")
    assert rows._eviction(good) == Eviction("prefix", 5.0, 7, "why")
    assert rows._eviction(("prefix", 0.0, 7, "why")) is not None
    bad = ((None,), (5, -0.5, float(1 << 36), math.nan, "5"), ("7", None), (b"why", None))
    for place, values in enumerate(bad):
        for value in values:
            assert rows._eviction((*good[:place], value, *good[place + 1 :])) is None


def test_another_schema_is_another_version() -> None:
    """Who has an index of an earlier one takes it over; the same number means the same tables."""
    assert (hashlib.sha256(rows._SCHEMA.encode()).hexdigest()[:16], rows._VERSION) == (
        "8bf4da510ea971aa",
        4,
    )


def manifest(created: float = 5.0) -> Manifest:
    made = draft_manifest(
        layout=SMALL, fingerprint=FINGERPRINT, tenant="", provenance="exact",
        tokens=some_tokens(40), start=bytes(16), parent=None, first_chunk=0, order=None,
    )  # fmt: skip
    return dataclasses.replace(made, created=created)


def test_a_row_says_what_the_manifest_does() -> None:
    made = manifest()
    row = rows._row_of((made, "c" * 64, 77))
    links = [link.hex() for link in made.links]
    assert row == (
        made.segment_id, "c" * 64, "00" * 16, links[0], links[-1], None,
        b"".join(link[:8] for link in made.links), 77, 5.0, "",
    )  # fmt: skip
    assert rows._row_of((manifest(-3.0), "c" * 64, 77))[8] == 0.0
    before = time.time()
    ahead = rows._row_of((manifest(before + 3600), "c" * 64, 77))[8]
    assert isinstance(ahead, float) and before <= ahead <= time.time()


class Listing:
    """What a catalog is made from; it can be away."""

    def __init__(self) -> None:
        self.there, self.away = [manifest()], False

    def present(self) -> set[str]:
        if self.away:
            raise StoreUnavailable("the disk has not answered")
        return {made.segment_id for made in self.there}

    def describe(self, ids: Iterable[str]) -> list[tuple[Manifest, str, int]]:
        wanted = set(ids)
        return [(made, "c" * 64, 77) for made in self.there if made.segment_id in wanted]


@pytest.fixture
def listing() -> Listing:
    return Listing()


@pytest.fixture
def catalog(listing: Listing) -> Catalog:
    return Catalog(None, listing.describe, listing.present, wait_s=1.0, readonly=False)


@pytest.mark.parametrize("name", ["rebuild", "reconcile"])
def test_what_cannot_be_listed_now_is_not_lost(
    catalog: Catalog, listing: Listing, name: str
) -> None:
    (id_,) = listing.present()
    catalog.reconcile()
    catalog.touch({id_: 9.0})
    assert catalog.listed
    listing.away = True
    getattr(catalog, name)()
    assert not catalog.listed and [e.id for e in catalog.entries()] == [id_]
    listing.away = False
    getattr(catalog, name)()
    assert catalog.listed and [(e.id, e.used) for e in catalog.entries()] == [(id_, 9.0)]
    listing.there.clear()
    getattr(catalog, name)()
    assert catalog.entries() == []


def test_what_a_prefix_needs_is_as_far_as_the_index_knows(catalog: Catalog) -> None:
    catalog.reconcile()
    links = manifest().links
    id_ = manifest().segment_id
    assert catalog.line(links[-1]) == catalog.line(links[0]) == ([id_], [id_], True)
    assert catalog.line(bytes(16)) == ([], [], False)
    catalog._db.write(lambda db: db.execute("UPDATE segments SET parent = 'gone'"))
    assert catalog.line(links[-1]) == ([id_], [id_], False)
    assert catalog.children("gone") == [id_] and catalog.leaves() == [id_]


def test_reservations_count_for_all_and_for_their_tenant(catalog: Catalog) -> None:
    catalog.reconcile()  # a segment of 77 bytes, without a tenant
    limits: dict[str | None, int] = {None: 100, "x": 20}
    assert catalog.reserve("a", 20, "x", limits) == {}
    assert (catalog.usage(), catalog.usage("x"), catalog.usage("")) == (97, 20, 77)
    assert catalog.reserve("b", 3, "", {None: 100}) == {}
    assert catalog.reserve("c", 5, "x", limits) == {None: 5, "x": 5}
    assert sorted(catalog.reserved()) == ["a", "b"]
    catalog.release("a")
    assert catalog.reserved() == ["b"] and catalog.usage() == 80


def test_the_latest_evictions_are_remembered(
    catalog: Catalog, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_EVICTIONS", 2)
    made = manifest()
    end = made.links[-1].hex()
    for turn in range(3):
        catalog.add((made, "c" * 64, 77))
        catalog.drop(made.segment_id, f"turn {turn}")
    assert [n for (n,) in catalog._db.read("SELECT reason FROM evictions ORDER BY 1", ())] == [
        "turn 1", "turn 2",
    ]  # fmt: skip
    why = catalog.why(end[:5], None)
    assert why is not None and (why.prefix_id, why.bytes, why.reason) == (end, 77, "turn 2")
    assert catalog.why(end, "") == why
    assert catalog.why(end, "somebody") is catalog.why("", None) is catalog.why("zz", None) is None


def test_a_mark_is_of_one_segment_as_it_was_written(catalog: Catalog) -> None:
    catalog.reconcile()
    id_ = manifest().segment_id
    catalog.quarantine(id_, "c" * 64, 3, "torn")
    catalog.quarantine(id_, "c" * 64, 3, "again")
    catalog.quarantine(id_, "c" * 64, 1, "torn")
    assert catalog.quarantined(id_, "c" * 64) == {1: "torn", 3: "torn"}
    assert catalog.quarantined(id_, "d" * 64) == {}
    catalog.mended(id_, "d" * 64, {1: "left"})
    assert catalog.quarantined(id_, "c" * 64) == {}
    assert catalog.quarantined(id_, "d" * 64) == {1: "left"}
    catalog.pardon(id_)
    assert catalog.quarantined(id_, "d" * 64) == {}


def test_scores_are_of_a_segment_that_is_there(catalog: Catalog) -> None:
    catalog.reconcile()
    id_ = manifest().segment_id
    importance, frequency = np.full((2, 3), 0.5, np.float32), np.full((2, 3), 4, np.uint32)
    catalog.save_scores("gone", importance, frequency)
    assert catalog.load_scores("gone") is None and catalog.load_scores(id_) is None
    catalog.save_scores(id_, importance, frequency)
    assert [e.score for e in catalog.entries()] == [2.0]
    found = catalog.load_scores(id_)
    assert found is not None
    np.testing.assert_array_equal(found[0], importance)
    np.testing.assert_array_equal(found[1], frequency)
    catalog._db.write(lambda db: db.execute("UPDATE scores SET importance = x'00'"))
    assert catalog.load_scores(id_) is None


def test_who_deletes_a_prefix_deletes_what_continues_it(store: ChunkStore) -> None:
    tokens = some_tokens(16 * 12)
    texts = [ingest(store, tokens[: 16 * end]) for end in (3, 6, 9, 12)]
    other = ingest(store, np.concatenate([tokens[: 16 * 3], some_tokens(32, 1)]))
    sizes = {e.id: e.bytes for e in store.index.catalog.entries()}
    ids = [span.segment_id for span in texts[-1].spans]
    assert len(ids) == 4 and len(sizes) == 5
    assert store.delete(texts[1]) == sum(sizes[id_] for id_ in ids[1:])
    assert store.files.segment_ids() == {ids[0], other.spans[1].segment_id}
    why = store.why_evicted(texts[3].id)
    assert why is not None and why.reason.startswith("deleted by its owner: ")
    counts = store.stats()
    assert (counts["evicted"], counts["evicted_deleted"]) == (3, 3)
    assert counts["evicted_room"] == counts["evicted_expired"] == counts["evicted_pruned"] == 0
    assert read_all(store, other).refused == 0


@pytest.mark.parametrize("mine", ["a", "b"])
def test_a_tenant_s_room_is_made_of_its_own(folder: Path, mine: str) -> None:
    """Whichever of the two it is, and though the others' are worth less."""
    size = SMALL.segment_bytes(64)
    with ChunkStore.open(folder, config=StoreConfig(quotas={mine: 2 * size})) as store:
        others = [ingest(store, some_tokens(64), salt=salt) for salt in ("", "a", "b")]
        kept = [prefix.spans[0].segment_id for prefix in others if prefix.salt != mine]
        for seed in range(1, 4):
            last = ingest(store, some_tokens(64, seed), salt=mine)
        ids = {e.id: e.tenant for e in store.index.catalog.entries()}
        assert ids.keys() >= {*kept, last.spans[0].segment_id}
        assert [*ids.values()].count(chain.tenant_mark(mine)) in (1, 2)
        assert store.stats()["evicted_room"] == store.stats()["evicted"] > 0


def test_who_removes_a_segment_is_told_whether_it_went(store: ChunkStore) -> None:
    prefix = ingest(store, some_tokens(64))
    (id_,) = (span.segment_id for span in prefix.spans)
    with store.reader(prefix):
        assert not store.remove_segment(id_)
    assert store.stats()["evicted"] == 0
    assert store.remove_segment(id_)
    assert store.stats()["evicted"] == 1 and store.files.segment_ids() == set()


def test_scores_of_two_shapes_are_none(store: ChunkStore) -> None:
    """A row that was damaged or written by something else."""
    (id_,) = (span.segment_id for span in ingest(store, some_tokens(64)).spans)
    store.save_scores(id_, np.ones((2, 4)), np.ones((2, 4)))
    assert store.load_scores(id_) is not None
    for column in ("importance", "frequency"):
        store.save_scores(id_, np.ones((2, 4)), np.ones((2, 4)))
        query = f"UPDATE scores SET {column} = zeroblob(16)"
        store.index.catalog._db.write(lambda db, query=query: db.execute(query))
        assert store.load_scores(id_) is None
    for wrong in (np.ones(8), np.ones((2, 3))):
        with pytest.raises(ValueError, match="scores: got"):
            store.save_scores(id_, wrong, np.ones((2, 4)))


def test_times_of_use_reach_the_index_now_and_then(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = ingest(store, some_tokens(64))
    bounds: Bounds = store.bounds

    def used() -> float:
        (found,) = store.index.catalog.entries()
        return found.used

    written = used()
    bounds._touched = time.monotonic()
    assert not bounds.touch(prefix) and used() == written  # not each time: that is a write
    bounds._touched = time.monotonic() - 6
    assert bounds.touch(prefix)
    bounds.flush()
    assert used() > written
    assert time.monotonic() - bounds._touched < 5
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    bounds.touch(prefix)
    assert used() < later
    bounds.flush()
    assert used() == later
