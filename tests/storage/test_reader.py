"""A prefix's reader: what it refuses, what it tells of faults, what it has computed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import ALIKE, find, hurt, segment_folder

from ckv_jax.storage import (
    ChunkStore,
    Prefix,
    ReadTimeout,
    SegmentDamaged,
    StoreClosed,
    StoreError,
    StoreUnavailable,
    grouping,
)
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.prefix import ProbePages, Span
from ckv_jax.storage.segment.deadline import Gate
from ckv_jax.storage.segment.packing import aligned
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.reads import Proof
from ckv_jax.storage.segment.segment import Segment
from tests.support.truth import FINGERPRINT, SMALL, ingest, kv_of, packs_of, some_tokens

TOKENS = some_tokens(16 * 9 + 5)
TRUTH = packs_of(SMALL, TOKENS, 1, np.arange(len(TOKENS)))
KEYS = np.ascontiguousarray(kv_of(SMALL, TOKENS)[:, 0]).view(np.uint8)


@pytest.fixture
def prefix(store: ChunkStore) -> Prefix:
    return ingest(store, TOKENS)


@pytest.fixture
def reader(store: ChunkStore, prefix: Prefix) -> Iterator[PrefixReader]:
    with store.reader(prefix) as opened:
        yield opened


def packs(count: int = 2) -> np.ndarray:
    return np.ones((count, *SMALL.pack_shape), SMALL.numpy_dtype)


def fixed(data: np.ndarray) -> np.ndarray:
    data.flags.writeable = False
    return data


# -- packs and probes ------------------------------------------------------------------------------


def test_packs_go_to_the_rows_that_are_named_and_no_others(reader: PrefixReader) -> None:
    out = packs(5)
    assert reader.read_packs(1, np.array([9, 0]), out, rows=np.array([3, 1])).all()
    assert np.array_equal(out[[3, 1]].view(np.uint16), TRUTH[[9, 0]].view(np.uint16))
    assert (out[[0, 2, 4]] == 1).all()
    assert reader.read_packs(1, np.array([], int), packs(0)).shape == (0,)


@pytest.mark.parametrize(
    ("group", "chunks", "out", "said"),
    [
        (0, [0, 10], packs(), r"ids in \[0, 10\], expected \[0, 10\)"),
        (0, [-1, 0], packs(), r"ids in \[-1, 0\]"),
        (2, [0, 1], packs(), "group: got 2"),
        (np.array([0, -1]), [0, 1], packs(), "group: got -1"),
        (0, [0, 1], packs(3), "out: got bfloat16"),
        (0, [0, 1], packs().view(np.uint16), "out: got uint16"),
        (0, [0, 1], packs(4)[::2], "C-contiguous, writable"),
        (0, [0, 1], fixed(packs()), "C-contiguous, writable"),
    ],
)
def test_packs_that_cannot_be_are_refused(
    reader: PrefixReader, group: Any, chunks: list[int], out: np.ndarray, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        reader.read_packs(group, np.array(chunks), out)


def test_probes_that_cannot_be_are_refused(reader: PrefixReader, prefix: Prefix) -> None:
    out = np.ones((len(TOKENS), 2, 8), SMALL.numpy_dtype)
    with pytest.raises(ValueError, match=r"layer: got 1, expected one of \(0, 2\)"):
        reader.read_probe(1, out)
    with pytest.raises(ValueError, match="out: got"):
        reader.read_probe(0, out[1:])
    pages, ids = ProbePages(prefix), np.arange(2)
    rows = np.ones((2, SMALL.pack_bytes), np.uint8)
    for wrong in (np.ones((4, SMALL.pack_bytes), np.uint8)[::2], fixed(rows.copy())):
        with pytest.raises(ValueError, match="C-contiguous, writable"):
            reader.read_probe_pages(0, pages, ids, wrong)
    with pytest.raises(ValueError, match=f"rows of {SMALL.pack_bytes + 1} bytes"):
        reader.read_probe_pages(0, pages, ids, np.ones((2, SMALL.pack_bytes + 1), np.uint8))
    assert reader.read_probe_pages(0, pages, ids[:0], rows).shape == (0,)
    reader.close()
    with pytest.raises(StoreClosed):
        reader.read_probe_pages(0, pages, ids, rows)


def test_the_chunk_of_a_page_that_is_bad_is_told_of_and_the_others_are_served(
    store: ChunkStore, folder: Path, prefix: Prefix, reader: PrefixReader
) -> None:
    (path,) = segment_folder(folder, prefix).glob("probe/c.*")
    shard, offset = _segment(store, prefix).locate("probe", 1, 5)
    hurt(path, offset + 7)
    pages = ProbePages(prefix)
    assert pages.first.tolist() == [0, 4, 8]
    out = np.ones((5, SMALL.pack_bytes), np.uint8)
    good = reader.read_probe_pages(2, pages, np.array([1, 2, 0]), out, rows=np.array([0, 2, 4]))
    assert good.tolist() == [False, True, True] and shard == 0
    assert not out[0].any() and (out[[1, 3]] == 1).all()
    assert np.array_equal(out[4], KEYS[2, :64].reshape(-1))
    right = KEYS[2, 128:].reshape(-1)
    assert np.array_equal(out[2, : right.size], right) and not out[2, right.size :].any()
    assert store.marked_chunks(find(store, TOKENS, SMALL, marked=True)).tolist() == [5]


def _segment(store: ChunkStore, prefix: Prefix) -> Segment:
    """As somebody else opens it."""
    span = prefix.spans[0]
    segment = store.open_segment(
        store.index.manifest(span.segment_id, span.checksum), span.checksum
    )
    segment.close()
    return segment


def test_the_first_bad_chunk_of_a_probe_is_told_of(
    store: ChunkStore, folder: Path, prefix: Prefix, reader: PrefixReader
) -> None:
    (path,) = segment_folder(folder, prefix).glob("probe/c.*")
    for chunk in (7, 8):
        hurt(path, _segment(store, prefix).locate("probe", 1, chunk)[1])
    out = np.ones((len(TOKENS), 2, 8), SMALL.numpy_dtype)
    assert reader.read_probe(2, out) == 7 * 16
    assert not out[7 * 16 :].view(np.uint16).any()
    assert store.marked_chunks(find(store, TOKENS, SMALL, marked=True)).tolist() == [7]


def test_pages_of_a_segment_that_is_gone_are_zero(store: ChunkStore) -> None:
    first = ingest(store, TOKENS[:64])
    prefix = ingest(store, TOKENS)
    assert len(prefix.spans) == 2 and first.spans[0] == prefix.spans[0]
    assert store.bounds.remove(prefix.spans[1].segment_id, "test")
    pages, out = ProbePages(prefix), np.ones((3, SMALL.pack_bytes), np.uint8)
    with store.reader(prefix) as reader:
        assert reader.read_probe_pages(0, pages, np.arange(3), out).tolist() == [True, False, False]
        assert np.array_equal(out[0], KEYS[0, :64].reshape(-1)) and not out[1:].any()
        assert reader.order.tolist() == [list(range(len(TOKENS)))] * 4  # none but that was said
    assert store.stats()["gone"] == 2


@pytest.mark.parametrize("asked", [None, 0.001])
def test_a_call_has_the_readers_deadline_or_its_own(
    store: ChunkStore, prefix: Prefix, asked: float | None
) -> None:
    memory = aligned(10 * SMALL.pack_bytes + 16)[16:]  # not fit for reads past the gate
    out = memory.view(SMALL.numpy_dtype).reshape(10, *SMALL.pack_shape)
    probe = np.ones((len(TOKENS), 2, 8), SMALL.numpy_dtype)
    assert store.gate.enter(1 << 40, 0)  # so much is in flight that nothing else may be
    said = f"within {asked or 0.002} s"
    with store.reader(prefix, deadline_s=0.002) as reader:
        with pytest.raises(ReadTimeout, match=said):
            reader.read_packs(0, np.arange(10), out, deadline_s=asked)
        with pytest.raises(ReadTimeout, match=said):
            reader.read_probe(0, probe, deadline_s=asked)
    store.gate.leave(1 << 40)


def test_what_has_no_digests_has_none_to_lose(store: ChunkStore, reader: PrefixReader) -> None:
    assert reader.read_digest() is None
    with store.reader(Prefix.empty(FINGERPRINT, ALIKE, "")) as empty:
        assert empty.read_digest() is None
    assert store.stats()["lost_digests"] == 0


# -- which tokens are in which chunks --------------------------------------------------------------


class Grouped(Segment):
    """A segment of alike tokens, of whose assignment a row may be damaged."""

    def __init__(self, found: np.ndarray | int) -> None:
        self.id = "grouped"
        self._found = found

    def assignment(self) -> np.ndarray | int:
        return self._found

    def reread(self, kind: str, row: int, column: int, **_: object) -> None:
        assert (kind, column) == ("assignment", 0)


def by_position(tokens: int) -> np.ndarray:
    """uint16 [groups, T]; of one group tokens 3 and 20 have changed their places."""
    found = np.tile(grouping.by_position(tokens, 16), (ALIKE.groups, 1))
    found[1, [3, 20]] = found[1, [20, 3]]
    return found


class Told:
    """A reader of five chunks and seven, runs of four, and what it was told to report."""

    def __init__(self, *segments: Segment | StoreError) -> None:
        spans = tuple(
            Span(segment_id=name, first_chunk=0, num_chunks=n, segment_chunks=n, checksum="c")
            for name, n in (("a", 5), ("b", 7), ("c", 1))[: len(segments)]
        )
        self.prefix = Prefix(
            id="", tokens=some_tokens((80, 180, 196)[len(segments) - 1]), spans=spans, layout=ALIKE,
            fingerprint=FINGERPRINT,
        )  # fmt: skip
        self.heard: list[Any] = []
        self.released: list[Any] = []
        self.reader = PrefixReader(
            self.prefix, segments, deadline_s=20, gate=Gate(), patience=Patience(20),
            proof=Proof(lambda *what: self.heard.append(what), Patience(20)),
            count=lambda _: None, release=self.released.append,
        )  # fmt: skip


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "RUN", 64)


@pytest.mark.usefixtures("small_runs")
@pytest.mark.parametrize(
    ("bad", "together", "tokens"),
    [
        ([1, 4, 5], [1], range(32)),
        ([0], [0], range(32)),
        ([3, 4], [3], range(64)),
        ([4, 5], [4], range(64, 80)),
        ([5], [5], range(80, 112)),
        ([6], [6], range(80, 112)),
        ([5, 8, 9, 11], [5, 8], range(80, 144)),
        ([8], [8], range(80, 144)),
        ([9, 11], [9, 11], range(144, 180)),
        ([10], [10], range(144, 176)),
    ],
)
def test_a_bad_chunk_is_made_again_with_its_run_up_to_its_last_token(
    bad: list[int], together: list[int], tokens: range
) -> None:
    told = Told(Grouped(by_position(80)), Grouped(by_position(100)))
    assert told.reader.reach(bad) == (together, tokens) and not told.heard


@pytest.mark.usefixtures("small_runs")
def test_where_the_order_is_damaged_the_whole_segment_is_made_again() -> None:
    damaged = Grouped(2)
    told = Told(damaged, Grouped(by_position(100)))
    assert told.reader.reach([1, 4, 5]) == ([1, 4], range(80))
    assert told.heard == [(damaged, 0, "assignment: not as it was written", True)]
    told = Told(Grouped(by_position(80)), damaged)
    assert told.reader.reach([7, 11]) == ([7, 11], range(80, 180))
    assert told.reader.reach([1, 7]) == ([1], range(32))


def test_orders_that_are_lost_are_told_of_by_their_first_chunks() -> None:
    told = Told(Grouped(by_position(80)), Grouped(0), Grouped(3))
    assert told.reader.lost_orders() == [5, 12]
    told = Told(Grouped(1), StoreUnavailable("no answer"), Grouped(by_position(80)))
    assert told.reader.lost_orders() == [0]


def test_the_error_of_a_segment_that_could_not_be_opened_is_asked_for() -> None:
    gone, away = SegmentDamaged("gone"), StoreUnavailable("no answer")
    told = Told(Grouped(by_position(80)), away, gone)
    with pytest.raises(StoreUnavailable, match="no answer"):
        told.reader.require()
    with pytest.raises(StoreUnavailable, match="no answer"):
        told.reader.reach([7])
    with pytest.raises(StoreUnavailable, match="its order cannot be read: no answer"):
        _ = told.reader.order
    Told(Grouped(0)).reader.require()


def test_segments_are_let_go_once() -> None:
    told = Told(Grouped(by_position(80)))
    with told.reader as reader:
        assert not told.released
        reader.close()
    reader.close()
    assert len(told.released) == 1
