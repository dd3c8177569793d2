"""One segment, held open: what is read from where, and which of it is as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import segment_folder

from ckv_jax.storage import ChunkStore, Layout, StoreConfig
from ckv_jax.storage.errors import SegmentDamaged, SegmentForeign, StoreUnavailable
from ckv_jax.storage.place.disk_timeout import DiskTimeout
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.place.place import open_place
from ckv_jax.storage.prefix import Span
from ckv_jax.storage.segment.deadline import Deadline, Gate
from ckv_jax.storage.segment.reads import Proof
from ckv_jax.storage.segment.segment import Segment
from tests.support.truth import ingest, some_tokens

LAYOUT = Layout(num_layers=6, num_kv_heads=2, head_dim=32, pack_layers=1, digest="int8")
"""Packs of a page, three files of them, and probes whose chunks are half a page."""
TOKENS = some_tokens(16 * 66 + 5)
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


# -- segments that readers share -----------------------------------------------------------------


@pytest.fixture
def spans(placed: ChunkStore) -> list[Span]:
    """Of two segments."""
    return [ingest(placed, some_tokens(32, seed)).spans[0] for seed in range(2)]


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
