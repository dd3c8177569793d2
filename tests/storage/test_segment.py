"""One segment, held open: what is read from where, and which of it is as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import ALIKE, segment_folder

from ckv_jax.storage import ChunkStore, Layout, StoreConfig, StoreUnavailable
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.place.patience import Patience
from ckv_jax.storage.place.place import open_place
from ckv_jax.storage.segment.packing import aligned
from ckv_jax.storage.segment.segment import Segment
from tests.support.truth import ingest, kv_of, packs_of, some_tokens

LAYOUT = Layout(num_layers=6, num_kv_heads=2, head_dim=32, pack_layers=1, digest="int8")
"""Packs of a page, three files of them, and probes whose chunks are half a page."""
TOKENS = some_tokens(16 * 66 + 5)
KEYS = np.ascontiguousarray(kv_of(LAYOUT, TOKENS)[:, 0]).view(np.uint8)
HALF = FILE_ALIGN // 2
SECONDS = 20.0


class Stored:
    """A segment's files, and the segment as it is opened now."""

    def __init__(self, folder: Path, layout: Layout, tokens: np.ndarray) -> None:
        self.place = open_place(folder, StoreConfig(), Patience(SECONDS))
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


@pytest.fixture
def direct(kept: Stored) -> None:
    if kept.place.queues is None:
        pytest.skip("no direct reads here")


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


def test_nothing_is_read_from_files_that_are_not_there(stored: Stored, direct: None) -> None:
    whole = stored.open()
    for kind, shard in (("packs", 1), ("probe", 0), ("digest", 0)):
        stored.change(stored.file(kind, shard), None)
    missing, chunks = stored.open(), np.array([3])
    packs = aligned(LAYOUT.pack_bytes).view(LAYOUT.disk_dtype).reshape(1, *LAYOUT.pack_shape)
    probe = aligned(32 * 128).view(LAYOUT.disk_dtype).reshape(32, 2, 32)

    def begun(segment: Segment, row: int) -> list[bool]:
        reads: list[Any] = [
            segment.begin_packs(row, chunks, packs, None),
            segment.begin_packs_direct(np.array([row]), chunks, packs, np.zeros(1, np.int64)),
            segment.begin_probe(row, 0, probe, None),
            segment.begin_probe_direct(row, 0, probe),
            segment.begin_digest(row, 0, probe.reshape(-1).view(np.uint8)[:64], None),
        ]
        for read in reads:
            if read is not None:
                read.exception(SECONDS) if hasattr(read, "exception") else read.result(SECONDS)
        return [read is not None for read in reads]

    for row in range(6):
        there = row not in (2, 3)
        assert begun(missing, row) == [there, there, False, False, False]
        assert begun(whole, row)[0]


def test_tokens_of_a_probe_are_read_directly_by_whole_pages(stored: Stored, direct: None) -> None:
    segment = stored.open()
    for at, count in ((0, 32), (32, 64), (992, 64), (64, 32)):
        out = aligned(count * 128).view(LAYOUT.disk_dtype).reshape(count, 2, 32)
        read = segment.begin_probe_direct(3, at, out)
        assert read is not None
        read.result(SECONDS)
        assert np.array_equal(out.view(np.uint8), KEYS[3, at : at + count])
    out = aligned(64 * 128).view(LAYOUT.disk_dtype).reshape(64, 2, 32)
    assert segment.begin_probe_direct(3, 16, out) is None  # not from a page's begin
    assert segment.begin_probe_direct(3, 0, out[:48]) is None  # not to one's end
    assert segment.begin_probe_direct(3, 0, out[1:33]) is None  # not into where a page fits


def test_runs_of_chunks_of_a_probe_are_read_directly_where_pages_begin(
    stored: Stored, direct: None
) -> None:
    """Up to a page's end: as much has to fit into a row."""
    segment = stored.open()
    out = aligned(4 * FILE_ALIGN).reshape(2, 2 * FILE_ALIGN)
    rows = np.array([1, 0])

    def begin(first: list[int], chunks: list[int], out: np.ndarray = out) -> Any:
        sizes = np.array(chunks) * HALF
        return segment.begin_probe_pages_direct(4, np.array(first), sizes, out, rows)

    read = begin([2, 10], [3, 4])
    assert read is not None
    read.result(SECONDS)
    assert np.array_equal(out[1, : 3 * HALF], KEYS[4, 32:80].reshape(-1))
    assert np.array_equal(out[0], KEYS[4, 160:224].reshape(-1))
    assert begin([3, 10], [3, 4]) is None
    assert begin([2, 10], [3, 5]) is None
    assert begin([2, 10], [1, 3], out.reshape(4, -1)) is None
    assert begin([2, 10], [1, 1], aligned(4 * FILE_ALIGN + 16)[16:].reshape(2, -1)) is None


@pytest.mark.parametrize(
    ("kind", "row", "column", "whole"),
    [
        ("packs", 0, 1, (True, False)),
        ("packs", 5, 1, (True, False)),
        ("probe", 0, 0, (False, True)),
        ("probe", 5, 1, (True, False)),
        ("digest", 0, 0, (False, True)),
        ("digest", 5, 2, (False, True)),
    ],
)
def test_a_chunk_is_whole_with_all_its_pieces_and_the_first_one_with_all_digests(
    stored: Stored, kind: str, row: int, column: int, whole: tuple[bool, bool]
) -> None:
    segment, manifest = stored.open(), stored.manifest
    assert segment.whole(manifest, 0) and segment.whole(manifest, 1)
    stored.hurt(kind, row, column)
    assert (segment.whole(manifest, 0), segment.whole(manifest, 1)) == whole


@pytest.mark.parametrize("row", [0, 3])
def test_the_first_chunk_is_whole_with_all_of_an_assignment(folder: Path, row: int) -> None:
    stored = Stored(folder, ALIKE, some_tokens(16 * 8))
    segment, manifest = stored.open(), stored.manifest
    assert isinstance(segment.assignment(), np.ndarray)
    stored.hurt("assignment", row, 0)
    assert segment.assignment() == row
    assert not segment.whole(manifest, 0) and segment.whole(manifest, 1)
    stored.restore()
    stored.store.close()


def test_a_newer_manifest_says_what_is_whole(stored: Stored) -> None:
    segment, changed = stored.open(), stored.manifest.pack_crc.copy()
    changed[2, 7] ^= 1
    newer = replace(stored.manifest, pack_crc=changed)
    assert segment.whole(newer, 6) and not segment.whole(newer, 7)
    assert segment.reread("packs", 2, 7) is not None
    assert segment.reread("packs", 2, 7, manifest=newer) is None


def test_the_parameters_of_a_digest_are_all_read_or_none(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = stored.open().digest_params()
    assert params is not None and params.shape == (6, LAYOUT.digest_params)
    written = [stored.open().reread("digest", row, 0) for row in range(6)]
    assert [row.tobytes() for row in params] == written and len(set(written)) == 6

    def away(*_: object) -> None:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "read", away)
        assert stored.open().digest_params() is None
    stored.hurt("digest", 5, 0)
    assert stored.open().digest_params() is None


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
