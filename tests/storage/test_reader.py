"""What proves a piece bad, and prefixes whose spans begin within a segment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import hurt, segment_folder

from ckv_jax.storage import ChunkStore, Prefix, verify_store
from ckv_jax.storage.errors import SegmentDamaged, SegmentForeign, StoreUnavailable
from ckv_jax.storage.place.disk import DiskTimeout
from ckv_jax.storage.segment import arrays
from ckv_jax.storage.segment.reads import Deadline, Gate, Proof
from tests.faults.tally import LAYOUT, Served, read_prefix
from tests.support.truth import FINGERPRINT, ingest, kv_of, read_all, read_probe, some_tokens


class Piece:
    """A segment whose piece at row 3, column 7 is these bytes, or raises."""

    def __init__(self, found: bytes | Exception | None) -> None:
        self._found = found

    def reread(self, kind: str, row: int, column: int) -> np.ndarray | None:
        assert (kind, row, column) == ("packs", 3, 7)
        if isinstance(self._found, Exception):
            raise self._found
        return None if self._found is None else np.frombuffer(self._found, np.uint8)


@pytest.mark.parametrize(
    ("found", "good", "told"),
    [
        (b"abcd", True, []),
        (None, False, [("group 3: differs from what was written", True)]),
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
    (path,) = segment_folder(folder, prefix, 1).glob("probe/c.*")
    row = LAYOUT.probe_heads * LAYOUT.head_dim * LAYOUT.disk_dtype.itemsize
    rows = len(LAYOUT.probe_layers)
    padded = (path.stat().st_size - 4 - 16 * rows) // rows // row
    at = LAYOUT.probe_layers.index(layer) * padded + (chunk - 5) * LAYOUT.chunk_tokens
    hurt(path, at * row)


def test_packs_probes_and_digest_of_such_a_prefix_are_right(folder: Path) -> None:
    with ChunkStore.open(folder) as store:
        prefix = two_segments(store, folder)
        assert read_all(store, prefix).right == LAYOUT.groups * prefix.num_chunks
        assert read_prefix(store, prefix) == Served(True, 0)


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


def test_a_checksum_is_of_its_place_too() -> None:
    data, rows, columns = np.zeros((3, 8), np.uint8), np.array([0, 0, 1]), np.array([0, 1, 0])
    found = arrays.checksums(7, rows, columns, data)
    assert len(set(found.tolist())) == 3
    each = zip(rows.tolist(), columns.tolist(), arrays.as_bytes(data), strict=True)
    assert found.tolist() == [arrays.checksum(7, *one) for one in each]
