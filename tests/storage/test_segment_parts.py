"""The small parts that reads of a segment are made of, each by itself."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckv_jax.storage.errors import ReadTimeout, SegmentDamaged, SegmentForeign, StoreUnavailable
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.prefix import Span
from ckv_jax.storage.segment import crc, manifest
from ckv_jax.storage.segment.deadline import Deadline, Gate
from ckv_jax.storage.segment.manifest import ManifestCache
from ckv_jax.storage.segment.packing import block_keys, key_places, pack
from ckv_jax.storage.segment.reads import Proof, Runs, rows_of
from ckv_jax.storage.segment.segment import OpenSegments

# -- where chunks lie --------------------------------------------------------------------------


def span(name: str, first: int, count: int) -> Span:
    return Span(
        segment_id=name, first_chunk=first, num_chunks=count, segment_chunks=99, checksum="c"
    )


def runs(*spans: Span, tokens: int) -> Runs:
    layout = SimpleNamespace(chunk_tokens=16)
    prefix: Any = SimpleNamespace(spans=spans, layout=layout, num_tokens=tokens)
    names: Any = [s.segment_id for s in spans]
    return Runs.of(prefix, names)


THREE = runs(span("a", 0, 4), span("b", 10, 1), span("c", 2, 3), tokens=16 * 7 + 5)


@pytest.mark.parametrize("order", [range(8), range(7, -1, -1), (5, 0, 4, 3, 7), (3, 4, 5), (4,)])
def test_every_chunk_is_found_in_the_segment_that_holds_it(order: range | tuple[int, ...]) -> None:
    places = [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 10), ("c", 2), ("c", 3), ("c", 4)]
    wanted = [places[chunk] for chunk in order]
    assert [THREE.locate(chunk) for chunk in order] == wanted
    found: list[Any] = [None] * len(order)
    every = np.arange(len(order))
    for segment, rows, local in THREE.split(np.array(order)):
        for row, chunk in zip(every[rows].tolist(), local.tolist(), strict=True):
            found[row] = segment, chunk
    assert found == wanted


def test_chunks_that_are_asked_for_one_after_the_other_are_read_into_one_view() -> None:
    parts = [(segment, rows) for segment, rows, _ in THREE.split(np.array([2, 0, 4, 5, 7, 6, 3]))]
    (first, apart), *others = parts
    assert first == "a" and apart.tolist() == [0, 1, 6]
    assert others == [("b", slice(2, 3)), ("c", slice(3, 6))]


def test_the_chunks_of_one_run_are_counted_from_where_it_begins() -> None:
    ((segment, rows, local),) = runs(span("a", 3, 4), tokens=64).split(np.array([2, 0]))
    assert segment == "a" and np.arange(2)[rows].tolist() == [0, 1] and local.tolist() == [5, 3]


def test_the_last_run_ends_with_the_text() -> None:
    ends = [(s.segment_id, name, first, end) for s, name, first, end in THREE.of_tokens()]
    assert ends == [("a", "a", 0, 64), ("b", "b", 64, 80), ("c", "c", 80, 117)]


@pytest.mark.parametrize("rows", [[2, 3, 4], [5], [0], [1, 3, 5], [4, 3], [1, 2, 4]])
def test_rows_are_read_into_where_they_lie(rows: list[int]) -> None:
    data = np.arange(12).reshape(6, 2)
    view = rows_of(data, np.array(rows))
    assert np.asarray(view).tolist() == data[rows].tolist()
    if rows in ([2, 3, 4], [5], [0]):
        assert np.shares_memory(view, data)


# -- how much is in flight ---------------------------------------------------------------------


class Flying:
    """A read that lands when it is told to."""

    def __init__(self) -> None:
        self.landed = False
        self._tell: list[Any] = []

    def add_done_callback(self, tell: Any) -> None:
        self._tell.append(tell)

    def done(self) -> bool:
        return self.landed

    def land(self) -> None:
        self.landed = True
        for tell in self._tell:
            tell(self)


def test_a_gate_lets_in_what_fits_and_a_large_read_alone() -> None:
    gate = Gate(10)
    assert gate.enter(25, 0) and gate.bytes == 25
    assert not gate.enter(1, 0) and gate.bytes == 25
    gate.leave(25)
    assert gate.enter(4, 0) and gate.enter(6, 0) and gate.bytes == 10
    assert not gate.enter(1, 0) and gate.bytes == 10
    threading.Timer(0.02, gate.leave, [4]).start()
    assert gate.enter(4, 10) and gate.bytes == 10


def test_reads_admitted_together_are_in_flight_until_the_last_has_landed() -> None:
    gate = Gate(10)
    deadline, first, second = Deadline(5, gate), Flying(), Flying()
    deadline.admit(8, "reading")
    deadline.watch([first, None, second], 8)
    first.land()
    assert gate.bytes == 8
    second.land()
    assert gate.bytes == 0
    deadline.admit(8, "reading")
    deadline.watch([None], 8)
    assert gate.bytes == 0


def test_what_is_late_has_settled_when_all_of_it_has() -> None:
    gate = Gate(10)
    deadline, flying, other = Deadline(0, gate), [Flying(), Flying()], Flying()
    deadline.watch(flying, 0)
    deadline.follow(other)
    deadline.follow(None)
    assert gate.enter(10, 0)
    with pytest.raises(ReadTimeout) as late:
        deadline.admit(1, "reading")
    for one in (*flying, other):
        assert not late.value.settled()
        one.land()
    assert late.value.settled()
    assert deadline.wait(None, "reading") is False and 0 < deadline.left() <= 0.001


# -- checksums ---------------------------------------------------------------------------------


def test_a_checksum_is_of_what_lies_where() -> None:
    data = np.arange(24, dtype=np.uint16).reshape(3, 2, 4)
    seed = crc.seed("s", "packs")
    rows, columns, where = [0, 1, 1, 0], [5, 5, 6, 5], [2, 2, 2, 0]
    found = crc.checksums(seed, rows, columns, data, where)
    assert found.dtype == np.uint32 and len(set(found.tolist())) == 4
    alone = [
        crc.checksum(seed, r, c, crc.as_bytes(data)[at])
        for r, c, at in zip(rows, columns, where, strict=True)
    ]
    assert found.tolist() == alone
    assert crc.as_bytes(data).shape == (3, 16) and not crc.as_bytes(data).flags.writeable
    assert len({seed, crc.seed("s", "probe"), crc.seed("t", "packs")}) == 3


# -- packs -------------------------------------------------------------------------------------

LAYOUTS = [
    Layout(num_layers=6, num_kv_heads=2, head_dim=8, pack_layers=4, chunk_tokens=8),
    Layout(num_layers=5, num_kv_heads=2, head_dim=8, pack_layers=2, chunk_tokens=8),
    Layout(num_layers=3, num_kv_heads=2, head_dim=8, pack_layers=1, kv_together=False,
           chunk_tokens=8),
    Layout(num_layers=3, num_kv_heads=2, head_dim=8, pack_layers=1, heads_apart=True,
           probe="none", chunk_tokens=8),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [5, 8, 16, 19])
def test_packs_hold_the_keys_of_every_layer_and_zeros_where_there_are_none(
    layout: Layout, tokens: int
) -> None:
    kv = np.random.default_rng(0).integers(
        1, 2**16, (layout.num_layers, 2, tokens, 2, 8), np.uint16, endpoint=False
    )
    chunks = layout.num_chunks(tokens)
    memory = np.full(layout.groups * chunks * layout.pack_bytes + 32, 255, np.uint8)
    packs = pack(kv, layout, memory)
    assert packs.shape == (layout.groups, chunks, *layout.pack_shape)
    assert (memory[-32:] == 255).all() and np.count_nonzero(packs) == kv.size
    for layer in range(layout.num_layers):
        keys = block_keys(packs, layer, layout)
        np.testing.assert_array_equal(keys[:tokens], kv[layer, 0])
        assert not keys[tokens:].any() and len(keys) == chunks * 8


def test_the_keys_of_a_layer_are_in_the_packs_of_its_group_or_of_its_heads() -> None:
    assert [key_places(5, one) for one in LAYOUTS[:1]] == [(range(1, 2), 1)]
    assert key_places(2, LAYOUTS[2]) == (range(4, 5), 0)
    assert key_places(2, LAYOUTS[3]) == (range(4, 6), 0)


# -- what is proven ----------------------------------------------------------------------------


class Piece:
    """A segment whose piece at row 3, column 7 is these bytes, or raises."""

    def __init__(self, found: bytes | Exception | None) -> None:
        self._found = found

    def reread(self, kind: str, row: int, column: int) -> bytes | None:
        assert (kind, row, column) == ("packs", 3, 7)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


@pytest.mark.parametrize(
    ("found", "good", "told"),
    [
        (b"abcd", True, []),
        (None, False, [("group 3: not as it was written", True)]),
        (StoreUnavailable("no answer"), False, [("group 3: no answer", False)]),
    ],
)
def test_only_bytes_that_are_there_and_wrong_prove_a_piece_bad(
    found: bytes | Exception | None, good: bool, told: list[tuple[str, bool]]
) -> None:
    heard: list[Any] = []
    segment: Any = Piece(found)
    out = np.zeros(4, np.uint8)
    proof = Proof(lambda *what: heard.append(what), Patience(5))
    where = segment, "packs", 3, 7, 11, "group 3", Deadline(5, Gate())
    assert proof.prove(*where, out) is good
    assert heard == [(segment, 11, *one) for one in told]
    assert out.tobytes() == (found if good else bytes(4))
    assert proof.prove(*where) is good


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (SegmentDamaged("segment x: gone"), True),
        (SegmentForeign("another's"), True),
        (StoreUnavailable("no answer"), False),
    ],
)
def test_a_segment_that_is_out_of_reach_is_not_gone(error: Any, gone: bool) -> None:
    heard: list[Any] = []
    proof = Proof(lambda *what: heard.append(what), Patience(5))
    assert proof.prove(error, "packs", 0, 0, 5, "group 0", Deadline(5, Gate())) is False
    assert heard == [(None, 5, f"group 0: {error}", gone)]


# -- what is kept ------------------------------------------------------------------------------


class Shelf:
    """Manifests by name, with a stamp that says when each was written."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[int, bytes]] = {}
        self.reads: list[str] = []

    def stamp(self, name: str) -> int | None:
        return self.kept[name][0] if name in self.kept else None

    def manifest(self, name: str) -> bytes:
        self.reads.append(name)
        return self.kept[name][1]


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    decode = SimpleNamespace(decode=lambda data, name: (f"{name} {data.decode()}", str(len(data))))
    monkeypatch.setattr(manifest, "Manifest", decode)
    return Shelf()


def test_a_manifest_is_read_once_until_it_changes(shelf: Shelf) -> None:
    files: Any = shelf
    cache = ManifestCache(files)
    shelf.kept = {"a": (1, b"one")}
    assert cache.load("a") == cache.load("a") == ("a one", "3") and shelf.reads == ["a"]
    shelf.kept["a"] = 2, b"other"
    assert cache.load("a") == ("a other", "5") and shelf.reads == ["a"] * 2
    cache.forget("a")
    cache.forget("never there")
    assert cache.load("a") == ("a other", "5") and shelf.reads == ["a"] * 3
    del shelf.kept["a"]
    with pytest.raises(SegmentDamaged, match="gone"):
        cache.load("a")


def test_the_manifest_not_asked_for_longest_makes_room(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_CACHE_BYTES", 20)
    files: Any = shelf
    cache = ManifestCache(files)
    shelf.kept = {name: (1, bytes(10)) for name in "abc"} | {"large": (1, bytes(50))}
    for name in "abacab":  # b makes room for c, and c for b
        cache.load(name)
    assert shelf.reads == ["a", "b", "c", "b"]
    shelf.reads.clear()
    for name in "ab" * 5:  # what is forgotten counts no longer, and what was never there never did
        cache.forget(name)
        cache.forget("d")
        cache.load(name)
    shelf.reads.clear()
    for name in "abcaca":  # a makes room for c, and b for a
        cache.load(name)
    assert shelf.reads == ["c", "a"]
    shelf.reads.clear()
    for name in ("a", "c", "large", "large", "c", "a"):  # what is too large is kept while last
        cache.load(name)
    assert shelf.reads == ["large", "c", "a"]


def test_a_segment_is_open_until_its_last_user_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Open:
        def __init__(self, manifest: str, checksum: str, place: object) -> None:
            self.id, self.checksum, self.users = manifest, checksum, 0

        def close(self) -> None:
            closed.append(self.id)

    def manifest(name: str, checksum: str) -> Any:
        if name == "gone":
            raise SegmentDamaged("gone")
        if name == "away":
            raise StoreUnavailable("away")
        return name

    monkeypatch.setattr("ckv_jax.storage.segment.segment.Segment", Open)
    counted: list[str] = []
    place: Any = None
    held = OpenSegments(place, manifest, counted.append)
    first: Any = held.acquire_all([span("a", 0, 1), span("gone", 0, 1), span("away", 0, 1)])
    assert first[0].id == "a" and counted == ["unread"]
    assert isinstance(first[1], SegmentDamaged) and isinstance(first[2], StoreUnavailable)
    again = held.acquire(span("a", 5, 1))
    assert again is first[0]
    held.release(first)
    assert closed == [] and held.acquire(span("a", 0, 1)) is again
    held.release([again])
    assert closed == []
    held.release([again])
    assert closed == ["a"] and held.acquire(span("a", 0, 1)) is not again
