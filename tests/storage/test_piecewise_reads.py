"""Reads of packs and probes in pieces: what is asked for once, and again, and what is in flight."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import find, hurt, segment_folder

from ckv_jax.storage import ChunkStore, Layout, Prefix
from ckv_jax.storage.place.place import Place
from ckv_jax.storage.prefix import ProbePages
from ckv_jax.storage.segment import reads as pieces
from ckv_jax.storage.segment.deadline import Gate
from ckv_jax.storage.segment.packing import aligned
from ckv_jax.storage.segment.segment import Segment
from tests.support.truth import ingest, kv_of, packs_of, some_tokens

LAYOUT = Layout(num_layers=4, num_kv_heads=2, head_dim=32, pack_layers=1)
"""Packs of a page, two files of them."""
TOKENS = some_tokens(16 * 8)
TRUTH = [packs_of(LAYOUT, TOKENS, group, np.arange(128)).view(np.uint8) for group in range(4)]


@pytest.fixture
def prefix(placed: ChunkStore) -> Prefix:
    """Of two segments, four chunks each."""
    ingest(placed, TOKENS[:64], layout=LAYOUT)
    made = ingest(placed, TOKENS, layout=LAYOUT)
    assert [span.num_chunks for span in made.spans] == [4, 4]
    return made


def memory(count: int, *, fit: bool) -> np.ndarray:
    """Packs of ones, where direct reads can go to or not."""
    data = aligned(count * LAYOUT.pack_bytes + 16)[0 if fit else 16 :][: count * LAYOUT.pack_bytes]
    data[:] = 1
    return data.view(LAYOUT.numpy_dtype).reshape(count, *LAYOUT.pack_shape)


def noted(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, note: Any, calls: Any = None
) -> list[Any]:
    """What `note` makes of the arguments of each call from now on; it goes to the end of `calls`,
    if there are any."""
    calls = [] if calls is None else calls
    real = getattr(where, name)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        calls.append(note(*args))
        return real(self, *args, **named)

    monkeypatch.setattr(where, name, call)
    return calls


def landed(store: ChunkStore) -> bool:
    """Whether nothing is in flight any more, soon: so much may only be read alone."""
    return store.gate.enter(1 << 40, 20)


def right(out: np.ndarray, groups: list[int], chunks: list[int]) -> bool:
    wanted = [TRUTH[group][chunk] for group, chunk in zip(groups, chunks, strict=True)]
    return np.array_equal(out.view(np.uint8), np.array(wanted))


@pytest.mark.parametrize("fit", [True, False])
@pytest.mark.parametrize(
    "groups",
    [[0, 0, 1, 3, 2, 3, 0, 1], [3, 3, 2, 1, 0, 0, 1, 2], [1, 0, 0, 1, 0, 1, 1, 0]],
    ids=str,
)
def test_packs_of_several_files_and_segments_are_each_read_once(
    placed: ChunkStore, place: Place, prefix: Prefix, monkeypatch: pytest.MonkeyPatch,
    groups: list[int], fit: bool,
) -> None:  # fmt: skip
    if fit and place.queues is None:
        pytest.skip("no direct reads here")
    through = noted(monkeypatch, Segment, "begin_packs", lambda _, chunks, *__: len(chunks))
    chunks, out = [0, 5, 1, 7, 2, 0, 4, 4], memory(8, fit=fit)
    with placed.reader(prefix) as reader:
        assert reader.read_packs(np.array(groups), np.array(chunks), out).all()
    assert right(out, groups, chunks) and sum(through) == (0 if fit else 8)


@pytest.mark.parametrize("piece", [1, 2 * LAYOUT.pack_bytes], ids=["of a pack", "of two packs"])
def test_two_pieces_are_on_their_way_while_one_is_checked(
    placed: ChunkStore, prefix: Prefix, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(pieces, "_PIECE_BYTES", piece)
    events = noted(monkeypatch, Segment, "begin_packs", lambda *_: "begun")
    noted(monkeypatch, Segment, "packs_good", lambda *_: "checked", events)
    chunks = list(range(4 if piece == 1 else 8))
    out = memory(len(chunks), fit=False)
    with placed.reader(prefix) as reader:
        assert reader.read_packs(2, np.array(chunks), out).all()
    assert right(out, [2] * len(chunks), chunks)
    assert events == ["begun"] * 3 + ["checked", "begun"] + ["checked"] * 3


def test_what_is_in_flight_is_as_much_as_is_read(
    placed: ChunkStore, folder: Path, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what has to be read again, pack by pack."""
    size = LAYOUT.pack_bytes
    shards = sorted(segment_folder(folder, prefix, 1).glob("packs/c.*"))
    hurt(shards[1], (4 + 2) * size)  # of group 3
    entered = noted(monkeypatch, Gate, "enter", lambda count, _: count)
    out = memory(5, fit=False)
    rows = np.array([4, 0, 2])
    with placed.reader(prefix) as reader:
        good = reader.read_packs(3, np.array([1, 6, 7]), out, rows=rows)
    assert entered == [3 * size, size] and landed(placed)
    assert good.tolist() == [True, False, True]
    assert right(out[[4, 2]], [3, 3], [1, 7]) and not out[0].view(np.uint8).any()
    assert (out[[1, 3]].view(np.uint8) == 1).all()
    assert placed.marked_chunks(find(placed, TOKENS, LAYOUT, marked=True)).tolist() == [6]


@pytest.mark.parametrize("fit", [True, False])
def test_packs_after_a_segment_that_is_gone_are_read_once(
    placed: ChunkStore, place: Place, folder: Path, prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch, fit: bool,
) -> None:  # fmt: skip
    if fit and place.queues is None:
        pytest.skip("no direct reads here")
    shutil.rmtree(segment_folder(folder, prefix, 0))
    through = noted(monkeypatch, Segment, "begin_packs", lambda _, chunks, *__: len(chunks))
    out = memory(8, fit=fit)
    with placed.reader(prefix) as reader:
        good = reader.read_packs(1, np.arange(8), out)
    assert good.tolist() == [False] * 4 + [True] * 4
    assert right(out[4:], [1] * 4, [4, 5, 6, 7]) and not out[:4].view(np.uint8).any()
    assert through == ([] if fit else [4]) and placed.stats()["gone"] == 4


def test_packs_that_no_read_brings_are_taken_from_what_proves_them_good(
    placed: ChunkStore, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Segment, "packs_good", lambda *args: np.zeros(len(args[2]), bool))
    out, rows = memory(5, fit=True), np.array([3, 1, 0])
    groups, chunks = [3, 1, 0], [6, 0, 5]
    with placed.reader(prefix) as reader:
        assert reader.read_packs(np.array(groups), np.array(chunks), out, rows=rows).all()
    assert right(out[rows], groups, chunks) and (out[[2, 4]].view(np.uint8) == 1).all()
    assert placed.stats()["bad_packs"] == 0


# -- probes ----------------------------------------------------------------------------------------

NARROW = Layout(num_layers=2, num_kv_heads=1, head_dim=8, pack_layers=1)
"""Sixteen bytes of a token in a probe, of which 1,024 are one block, and pages of two chunks."""
LONG = some_tokens(2 * 1024 + 37)
KEYS = np.ascontiguousarray(kv_of(NARROW, LONG)[:, 0]).view(np.uint8)


@pytest.fixture
def long(placed: ChunkStore) -> Prefix:
    return ingest(placed, LONG, layout=NARROW)


def probe_memory() -> np.ndarray:
    """Where no direct read can go to."""
    data = aligned(len(LONG) * 16 + 16)[16:]
    return data.view(NARROW.numpy_dtype).reshape(-1, 1, 8)


@pytest.mark.parametrize(
    ("piece", "reads"),
    [
        (1, [(0, 1024), (1024, 1024), (2048, 37)]),
        ((32 << 10) - 1, [(0, 1024), (1024, 1024), (2048, 37)]),
        (32 << 10, [(0, 2048), (2048, 37)]),
        (48 << 10, [(0, 2085)]),
    ],
)
def test_a_probe_is_read_by_as_many_whole_blocks_as_a_piece_has(
    placed: ChunkStore, long: Prefix, monkeypatch: pytest.MonkeyPatch, piece: int,
    reads: list[tuple[int, int]],
) -> None:  # fmt: skip
    monkeypatch.setattr(pieces, "_PIECE_BYTES", piece)
    begun = noted(monkeypatch, Segment, "begin_probe", lambda _, at, out, *__: (at, len(out)))
    entered = noted(monkeypatch, Gate, "enter", lambda count, _: count)
    out = probe_memory()
    with placed.reader(long) as reader:
        assert reader.read_probe(1, out) == len(LONG)
    assert np.array_equal(out.view(np.uint8), KEYS[1]) and begun == reads
    assert entered == [16 * count for _, count in reads] and landed(placed)


@pytest.mark.parametrize("fails", [0, 1024, 2048])
def test_a_probe_is_good_up_to_the_first_piece_that_cannot_be_read(
    placed: ChunkStore, long: Prefix, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    monkeypatch.setattr(pieces, "_PIECE_BYTES", 1)
    begin = Segment.begin_probe
    monkeypatch.setattr(
        Segment, "begin_probe",
        lambda self, row, at, *more: None if at == fails else begin(self, row, at, *more),
    )  # fmt: skip
    out = probe_memory()
    with placed.reader(long) as reader:
        assert reader.read_probe(0, out) == fails
    assert np.array_equal(out[:fails].view(np.uint8), KEYS[0, :fails])
    assert not out[fails:].view(np.uint8).any() and placed.stats()["quarantined"] == 0


def test_pages_that_are_read_together_are_in_flight_together(
    placed: ChunkStore, long: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, size = ProbePages(long), NARROW.pack_bytes
    last = len(pages) - 1
    assert pages.tokens[[0, last]].tolist() == [32, 5]
    entered = noted(monkeypatch, Gate, "enter", lambda count, _: count)
    out = aligned(3 * size + 16)[16:].reshape(3, size)
    with placed.reader(long) as reader:
        assert reader.read_probe_pages(1, pages, np.array([last, 7, 3]), out).all()
    assert entered == [(5 + 32 + 32) * 16] and landed(placed)
    assert np.array_equal(out[1], KEYS[1, 7 * 32 : 8 * 32].reshape(-1))
    assert np.array_equal(out[0, :80], KEYS[1, -5:].reshape(-1)) and not out[0, 80:].any()


def test_a_probe_is_asked_for_by_sixty_four_pages_at_a_time(
    placed: ChunkStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many requests as that are in flight in a queue of the kernel's."""
    if place.queues is None:
        pytest.skip("no direct reads here")
    layout = Layout(num_layers=1, num_kv_heads=1, head_dim=128, pack_layers=1)
    prefix = ingest(placed, some_tokens(16 * 66), layout=layout)
    asked = noted(monkeypatch, type(place.queues), "read", lambda _, offsets, *__: len(offsets))
    for chunks, reads in ((64, 1), (65, 2)):
        part = find(placed, prefix.tokens[: 16 * chunks], layout)
        out = aligned(chunks * 4096).view(layout.numpy_dtype).reshape(-1, 1, 128)
        with placed.reader(part) as reader:
            assert reader.read_probe(0, out) == 16 * chunks
        assert asked.pop() == reads
