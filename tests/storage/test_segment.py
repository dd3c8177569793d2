"""One segment, held open: what is read from where, and which of it is as it was written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import segment_folder

from ckv_jax.storage import ChunkStore, Layout, StoreConfig
from ckv_jax.storage.errors import ReadTimeout, SegmentDamaged, SegmentForeign, StoreUnavailable
from ckv_jax.storage.place.disk import DiskTimeout
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.place.place import Place, open_place
from ckv_jax.storage.prefix import Span
from ckv_jax.storage.segment import arrays
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.reads import Deadline, Gate, Proof
from ckv_jax.storage.segment.segment import OpenSegments, Segment
from tests.support.truth import ingest, kv_of, packs_of, some_tokens

LAYOUT = Layout(num_layers=6, num_kv_heads=2, head_dim=32, pack_layers=1, digest="int8")
"""Packs of a page, three files of them, and probes whose chunks are half a page."""
TOKENS = some_tokens(16 * 66 + 5)
KEYS = np.ascontiguousarray(kv_of(LAYOUT, TOKENS)[:, 0]).view(np.uint8)
SECONDS = 20.0


class Stored:
    """A segment's files, and the segment as it is opened now."""

    def __init__(self, folder: Path, layout: Layout, tokens: np.ndarray) -> None:
        self.place = open_place(folder, StoreConfig(), DiskTimeout(SECONDS))
        self.store = ChunkStore(self.place, StoreConfig())
        prefix = ingest(self.store, tokens, layout=layout)
        (span,) = prefix.spans
        self.folder = segment_folder(folder, prefix)
        self.manifest = self.store.index.manifest(span.segment_id, span.checksum)
        self._checksum = span.checksum
        self._opened: list[Segment] = []
        self._before: dict[Path, bytes] = {}

    def open(self) -> Segment:
        self._opened.append(Segment(self.manifest, self._checksum, self.place))
        return self._opened[-1]

    def file(self, kind: str, shard: int = 0) -> Path:
        return self.folder / self.manifest.arrays[kind].file(shard)

    def change(self, path: Path, data: bytes | None) -> None:
        """None: there is no such file."""
        self._before.setdefault(path, path.read_bytes())
        path.write_bytes(data) if data is not None else path.unlink()

    def hurt(self, kind: str, row: int, column: int) -> None:
        """The first byte of a piece."""
        shard, offset = self.open().locate(kind, row, column)
        data = bytearray(self.file(kind, shard).read_bytes())
        data[offset] ^= 1
        self.change(self.file(kind, shard), bytes(data))

    def restore(self) -> None:
        for path, data in self._before.items():
            path.write_bytes(data)
        for segment in self._opened:
            segment.close()
        self._before, self._opened = {}, []


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    made = Stored(tmp_path_factory.mktemp("kept") / "store", LAYOUT, TOKENS)
    yield made
    made.store.close()


@pytest.fixture
def stored(kept: Stored) -> Iterator[Stored]:
    yield kept
    kept.restore()


def test_every_piece_is_found_where_it_was_written(stored: Stored) -> None:
    segment = stored.open()
    record = LAYOUT.digest_record(len(TOKENS))
    for row in (0, 3, 5):
        packs = packs_of(LAYOUT, TOKENS, row, np.arange(len(TOKENS)))
        for chunk in (0, 1, 63, 64, 66):
            end = min(chunk * 16 + 16, len(TOKENS))
            assert segment.reread("packs", row, chunk) == packs[chunk].tobytes()
            assert segment.reread("probe", row, chunk) == KEYS[row, chunk * 16 : end].tobytes()
        parts = [segment.reread("digest", row, part) for part in range(3)]
        assert tuple(len(part or b"") for part in parts) == record
        for kind, column, found in [
            *(("digest", part, found) for part, found in enumerate(parts)),
            ("packs", 64, packs[64].tobytes()),
            ("probe", 64, KEYS[row, 1024:1040].tobytes()),
        ]:
            shard, offset = segment.locate(kind, row, column)
            data = stored.file(kind, shard).read_bytes()
            assert found is not None and data[offset : offset + len(found)] == found


# -- opening ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("no answer"), KeyboardInterrupt()], ids=type)
def test_a_segment_that_cannot_be_opened_is_not_held(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    expected = StoreUnavailable if isinstance(error, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(expected):
        patch.setattr(LocalFiles, "damaged", fail)
        stored.open()
    claim = stored.place.files.claim(stored.folder.name)
    assert claim is not None
    claim.release()


def read_pack(segment: Segment) -> bool:
    """Whether one can be read through TensorStore."""
    out = np.zeros((1, *LAYOUT.pack_shape), LAYOUT.disk_dtype)
    read = segment.begin_packs(4, np.array([2]), out, None)
    if read is None:
        return False
    read.result(SECONDS)
    rows = np.zeros(1, np.int64)
    return bool(segment.packs_good(np.array([4]), np.array([2]), out, rows).all())


def test_an_array_is_what_the_manifest_says_whatever_is_written_beside_it(stored: Stored) -> None:
    for path in stored.folder.rglob("zarr.json"):
        stored.change(path, b"{}")
    assert read_pack(stored.open())


def test_an_array_that_could_not_be_opened_is_asked_for_again(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failed:
        def result(self, timeout: float) -> None:
            raise OSError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr("ckv_jax.storage.segment.segment.ts.open", lambda *_, **__: Failed())
        segment = stored.open()
    assert not read_pack(segment) and read_pack(segment)


# -- segments that readers share -----------------------------------------------------------------


@pytest.fixture
def spans(placed: ChunkStore) -> list[Span]:
    """Of two segments."""
    return [ingest(placed, some_tokens(32, seed)).spans[0] for seed in range(2)]


def held(place: Place, span: Span) -> bool:
    """Whether somebody reads a segment, so that nobody may remove it."""
    claim = place.files.claim(span.segment_id)
    if claim is not None:
        claim.release()
    return claim is None


def opening(
    store: ChunkStore, place: Place, before: Callable[[int], None], counted: list[str] | None = None
) -> OpenSegments:
    """`before` is told how often a manifest has been asked for, whenever one is."""
    asked = 0

    def manifest(segment_id: str, checksum: str) -> Manifest:
        nonlocal asked
        asked += 1
        before(asked)
        return store.index.manifest(segment_id, checksum)

    return OpenSegments(place, manifest, ([] if counted is None else counted).append)


def test_who_opens_a_segment_later_than_another_thread_shares_its(
    placed: ChunkStore, place: Place, spans: list[Span]
) -> None:
    others: list[Segment] = []

    def faster(asked: int) -> None:
        if asked == 1:
            others.append(shared.acquire(spans[0]))

    shared = opening(placed, place, faster)
    found = shared.acquire(spans[0])
    assert found is others[0] is shared.acquire(spans[0])
    for _ in range(3):
        assert held(place, spans[0])
        shared.release([found])
    assert not held(place, spans[0])


@pytest.mark.parametrize("error", [SegmentDamaged("replaced"), KeyboardInterrupt()], ids=type)
def test_a_segment_that_is_replaced_before_it_is_held_is_let_go(
    placed: ChunkStore, place: Place, spans: list[Span], error: BaseException
) -> None:
    seen: list[bool] = []

    def replaced(asked: int) -> None:
        seen.append(held(place, spans[0]))
        if asked == 2:
            raise error

    with pytest.raises(type(error)):
        opening(placed, place, replaced).acquire(spans[0])
    assert seen == [False, True] and not held(place, spans[0])


def test_what_was_opened_before_an_interruption_is_let_go(
    placed: ChunkStore, place: Place, spans: list[Span]
) -> None:
    seen: list[bool] = []

    def interrupted(asked: int) -> None:
        if asked == 3:
            seen.append(held(place, spans[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opening(placed, place, interrupted).acquire_all(spans)
    assert seen == [True] and not held(place, spans[0])


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


# -- checksums ---------------------------------------------------------------------------------


def test_a_checksum_is_of_what_lies_where() -> None:
    data = np.arange(24, dtype=np.uint16).reshape(3, 2, 4)
    seed = arrays.seed("s", "packs")
    rows, columns, where = [0, 1, 1, 0], [5, 5, 6, 5], [2, 2, 2, 0]
    found = arrays.checksums(seed, rows, columns, data, where)
    assert found.dtype == np.uint32 and len(set(found.tolist())) == 4
    alone = [
        arrays.checksum(seed, r, c, arrays.as_bytes(data)[at])
        for r, c, at in zip(rows, columns, where, strict=True)
    ]
    assert found.tolist() == alone
    assert arrays.as_bytes(data).shape == (3, 16) and not arrays.as_bytes(data).flags.writeable
    assert len({seed, arrays.seed("s", "probe"), arrays.seed("t", "packs")}) == 3


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
    proof = Proof(lambda *what: heard.append(what), DiskTimeout(5))
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
    proof = Proof(lambda *what: heard.append(what), DiskTimeout(5))
    assert proof.prove(error, "packs", 0, 0, 5, "group 0", Deadline(5, Gate())) is False
    assert heard == [(None, 5, f"group 0: {error}", gone)]


# -- deadlines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ReadTimeout("late", 5, bool), MemoryError()], ids=str)
def test_only_an_error_that_leaves_the_buffer_free_waits_for_reads(error: Exception | None) -> None:
    """Its caller takes the buffer as free, unless he is told that reads are late."""
    waited: list[str] = []

    class Read:
        def __init__(self, name: str) -> None:
            self.name = name

        def result(self, timeout: float) -> None:
            waited.append(self.name)

    def read() -> None:
        with Deadline(5, Gate()) as deadline:
            deadline.follow(Read("first"))
            deadline.follow(Read("second"))
            if error is not None:
                raise error

    if error is None:
        read()
    else:
        with pytest.raises(type(error)):
            read()
    assert waited == (["first", "second"] if isinstance(error, MemoryError) else [])


# -- starting reads ------------------------------------------------------------------------------


def test_what_starts_reads_too_late_has_settled_when_it_is_over() -> None:
    deadline, disk_timeout, go_on = Deadline(0, Gate()), DiskTimeout(5), threading.Event()
    over = threading.Event()

    def hangs() -> None:
        assert go_on.wait(20)
        deadline.follow(read)
        over.set()

    read: Future[None] = Future()
    with pytest.raises(ReadTimeout, match="starting did not return within 0 s") as late:
        deadline.start(disk_timeout, "starting", hangs)
    assert not late.value.settled()
    go_on.set()
    assert over.wait(20) and not late.value.settled()  # it has started a read
    read.set_result(None)
    until = time.monotonic() + 20
    while not late.value.settled():
        assert time.monotonic() < until
        time.sleep(0.001)
    disk_timeout.close()
