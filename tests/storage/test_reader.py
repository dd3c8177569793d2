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
    StoreClosed,
    StoreError,
    StoreUnavailable,
    verify_store,
)
from ckv_jax.storage import (
    layout as layouts,
)
from ckv_jax.storage.place.disk import DiskTimeout
from ckv_jax.storage.prefix import ProbePages, Span
from ckv_jax.storage.segment.arrays import aligned
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.reads import Gate, Proof, Runs
from ckv_jax.storage.segment.segment import Segment
from tests.faults.tally import LAYOUT, Served, read_prefix
from tests.support.truth import (
    FINGERPRINT,
    SMALL,
    ingest,
    kv_of,
    packs_of,
    read_all,
    read_probe,
    some_tokens,
)

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
        read_probe(reader, 1, out)
    pages, ids = ProbePages(prefix), np.arange(2)
    rows = np.ones((2, SMALL.pack_bytes), np.uint8)
    for wrong in (np.ones((4, SMALL.pack_bytes), np.uint8)[::2], fixed(rows.copy())):
        with pytest.raises(ValueError, match="C-contiguous, writable"):
            reader.read_probe_pages(0, pages, ids, wrong)
    with pytest.raises(ValueError, match=f"rows of {SMALL.pack_bytes - 1} bytes"):
        reader.read_probe_pages(0, pages, ids, np.ones((2, SMALL.pack_bytes - 1), np.uint8))
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
    pages, probe = ProbePages(prefix), np.ones((3, SMALL.pack_bytes + 16), np.uint8)
    assert store.gate.enter(1 << 40, 0)  # so much is in flight that nothing else may be
    said = f"within {asked or 0.002} s"
    with store.reader(prefix, deadline_s=0.002) as reader:
        with pytest.raises(ReadTimeout, match=said):
            reader.read_packs(0, np.arange(10), out, deadline_s=asked)
        with pytest.raises(ReadTimeout, match=said):
            reader.read_probe_pages(0, pages, np.arange(3), probe, deadline_s=asked)
    store.gate.leave(1 << 40)


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
    found = np.tile(layouts.by_position(tokens, 16), (ALIKE.groups, 1))
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
            self.prefix, segments, deadline_s=20, gate=Gate(), disk_timeout=DiskTimeout(20),
            proof=Proof(lambda *what: self.heard.append(what), DiskTimeout(20)),
            count=lambda _: None, release=self.released.append,
        )  # fmt: skip


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "RUN", 64)


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


# -- spans that begin within a segment -----------------------------------------------------------


SPANNED = some_tokens(200)
BEGIN = 8
"""Chunk from which on the second segment serves; it starts at chunk 5."""


def two_segments(store: ChunkStore, folder: Path) -> Prefix:
    """Chunks 0 to 7 and chunks 5 to 12: what was bad was stored again, and then turned out good."""
    first = ingest(store, SPANNED[:128], layout=LAYOUT)
    id_, checksum = first.spans[0].segment_id, first.spans[0].checksum
    store.index.quarantine(id_, checksum, 5, "looked bad")
    second = ingest(store, SPANNED, layout=LAYOUT)
    assert [span.num_chunks for span in second.spans] == [5, 8]
    assert verify_store(store, repair=True).pardoned == [id_]
    found = store.longest_prefix(SPANNED, fingerprint=FINGERPRINT, layout=LAYOUT)
    assert [(s.first_chunk, s.num_chunks) for s in found.spans] == [(0, BEGIN), (3, 5)]
    assert found.num_tokens == len(SPANNED) and found.id == second.id
    return found


def damage(folder: Path, prefix: Prefix, chunk: int, layer: int = 0) -> None:
    """Flips a bit of a chunk's keys in the probe of the second segment, where it is chunk - 5."""
    id_ = prefix.spans[1].segment_id
    (path,) = (folder / "segments" / id_[:2] / id_).glob("probe/c.*")
    row = LAYOUT.probe_heads * LAYOUT.head_dim * LAYOUT.disk_dtype.itemsize
    data = bytearray(path.read_bytes())
    padded = (len(data) - 4 - 16 * len(LAYOUT.probe_layers)) // len(LAYOUT.probe_layers) // row
    at = LAYOUT.probe_layers.index(layer) * padded + (chunk - 5) * LAYOUT.chunk_tokens
    data[at * row] ^= 1
    path.write_bytes(data)


def test_packs_probes_and_digest_of_such_a_prefix_are_right(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = two_segments(store, folder)
        assert read_all(store, prefix).right == LAYOUT.groups * prefix.num_chunks
        assert read_prefix(store, prefix) == Served(True, 0)


def test_a_chunk_is_located_where_it_is_read(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        found = two_segments(store, folder)
    segments = [StoreError("the first"), StoreError("the second")]
    runs = Runs.of(found, segments)
    for chunk in range(found.num_chunks):
        ((segment, _, (local,)),) = runs.split(np.array([chunk]))
        assert runs.locate(chunk) == (segment, local)
        assert segment is segments[chunk >= BEGIN]
        assert local == (chunk if chunk < BEGIN else chunk - 5)


@pytest.mark.parametrize(("chunk", "good"), [(12, 12), (BEGIN, BEGIN)])
def test_a_probe_is_good_up_to_the_first_bad_chunk(folder: Path, chunk: int, good: int) -> None:
    layer = LAYOUT.probe_layers[-1]
    with ChunkStore.open(folder) as store:
        prefix = two_segments(store, folder)
        damage(folder, prefix, chunk, layer)
        keys = kv_of(LAYOUT, SPANNED)[:, 0]
        out = np.ones((len(SPANNED), LAYOUT.probe_heads, LAYOUT.head_dim), LAYOUT.numpy_dtype)
        with store.reader(prefix) as reader:
            assert read_probe(reader, layer, out) == good * LAYOUT.chunk_tokens
            right = good * LAYOUT.chunk_tokens
            np.testing.assert_array_equal(
                out[:right].view(np.uint16), np.ascontiguousarray(keys[layer, :right]).view("u2")
            )
            assert not out[right:].view(np.uint16).any()
            for other in LAYOUT.probe_layers[:-1]:
                assert read_probe(reader, other, out) == len(SPANNED)
        span = prefix.spans[1]
        quarantined = store.index.catalog.quarantined(span.segment_id, span.checksum)
        assert quarantined
        assert (
            store.longest_prefix(SPANNED, fingerprint=FINGERPRINT, layout=LAYOUT).num_tokens
            == max(good, BEGIN) * LAYOUT.chunk_tokens
        )
