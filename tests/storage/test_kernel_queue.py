"""Reads past TensorStore: the same bytes, and every fault an error of the one read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_reads import slow_reads

from bench.fault_kinds import corruption
from bench.truth import FINGERPRINT, SMALL, ingest, kv_of, packs_of, read_all, some_tokens
from ckv_jax.storage import (
    ChunkStore,
    Layout,
    ReadTimeout,
    StoreConfig,
    verify_store,
)
from ckv_jax.storage.place import kernel_queue
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues, KernelRead
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.probe_pages import ProbePages
from ckv_jax.storage.segment.packing import aligned
from ckv_jax.storage.segment.segment import Segment

PAGES = Layout(num_layers=4, num_kv_heads=2, head_dim=32, pack_layers=2, digest="int8")
"""Packs of two pages: small, and read directly."""
APART = Layout(num_layers=3, num_kv_heads=4, head_dim=32, pack_layers=1, kv_together=False)
"""Packs of keys and packs of values."""


@pytest.fixture
def queues(file: Path) -> Iterator[KernelQueues]:
    try:
        made = KernelQueues()
    except OSError as e:
        pytest.skip(f"no asynchronous reads here: {e}")
    if not made.works(file):
        pytest.skip("no direct I/O on this file system")
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(np.random.default_rng(0).bytes(300 * FILE_ALIGN))
    return path


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECT)


def rows(count: int) -> np.ndarray:
    return aligned(count * FILE_ALIGN).reshape(count, FILE_ALIGN)


def test_more_reads_than_a_queue_holds(queues: KernelQueues, file: Path) -> None:
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    ids = np.random.default_rng(1).permutation(len(pages))
    out = rows(len(ids))
    queues.read(opened(file), ids * FILE_ALIGN, out, slice(None)).result(timeout=5)
    assert np.array_equal(out, pages[ids])


def test_rows_that_lie_apart(queues: KernelQueues, file: Path) -> None:
    pages = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, FILE_ALIGN)
    out = rows(6)
    where = np.array([5, 0, 2])
    queues.read(opened(file), np.array([7, 8, 9]) * FILE_ALIGN, out, where).result(timeout=5)
    assert np.array_equal(out[where], pages[7:10])
    assert not out[[1, 3, 4]].any()


@pytest.mark.parametrize("offsets", [[0, 299, 300], [1 << 40], [FILE_ALIGN + 8]])
def test_what_cannot_be_read_in_full(queues: KernelQueues, file: Path, offsets: list[int]) -> None:
    """Past the end, and no multiple of a block."""
    places = np.array(offsets) * (FILE_ALIGN if len(offsets) == 3 else 1)
    fd = opened(file)
    read = queues.read(fd, places, rows(len(places)), slice(None))
    with pytest.raises(OSError):
        read.result(timeout=5)
    assert read.done()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    queues.read(opened(file), np.zeros(1, np.int64), rows(1), slice(None)).result(timeout=5)


def test_the_trial_at_open_tells_what_the_disk_cannot_read(
    queues: KernelQueues, file: Path
) -> None:
    """Reads that go past the page cache are of whole blocks; the trial is such a read."""
    fd, page = os.open(file, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, FILE_ALIGN)
    try:
        os.preadv(fd, [memoryview(page)[:8]], 0)
        pytest.skip("this file system takes the page cache for what is no whole block")
    except OSError:
        assert not queues._reads(file, 8)
    finally:
        os.close(fd)


def test_a_file_that_is_not_open(queues: KernelQueues) -> None:
    fd = os.open("/", os.O_RDONLY)
    with pytest.raises(OSError):
        queues.read(fd, np.zeros(2, np.int64), rows(2), slice(None)).result(timeout=5)


@pytest.mark.parametrize("timeout", [0.0, -5.0])
def test_a_late_read_settles(queues: KernelQueues, file: Path, timeout: float) -> None:
    """Given up at once: it may land later, keeps its buffer until then, and its queue returns."""
    for _ in range(50):
        read = queues.read(opened(file), np.arange(300) * FILE_ALIGN, rows(300), slice(None))
        with contextlib.suppress(TimeoutError):
            read.result(timeout=timeout)
        while not read.done():
            pass
    assert not kernel_queue._IN_FLIGHT and len(queues._idle) == 1


def test_a_buffer_outlives_everybody_until_its_read_has_landed(
    queues: KernelQueues, file: Path
) -> None:
    gone = KernelQueues()
    out = rows(8)
    read = gone.read(opened(file), np.arange(8) * FILE_ALIGN, out, slice(None))
    alive = weakref.ref(out)
    gone.close()
    del gone, read, out
    gc.collect()
    assert alive() is not None
    (left,) = kernel_queue._IN_FLIGHT
    left.given_up = True
    while kernel_queue._IN_FLIGHT:  # the next read, of any store, sees that it has landed
        again = queues.read(opened(file), np.zeros(1, np.int64), rows(1), slice(None))
        again.result(timeout=5)
    del left, again
    gc.collect()
    assert alive() is None


def test_rows_that_are_not_there_cost_no_queue(queues: KernelQueues, file: Path) -> None:
    fd = opened(file)
    with pytest.raises(IndexError):
        queues.read(fd, np.zeros(1, np.int64), rows(1), np.array([7]))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert len(queues._idle) == 1 and not kernel_queue._IN_FLIGHT


def test_queues_outlive_their_close(file: Path, queues: KernelQueues) -> None:
    queues.close()
    for _ in range(2):
        queues.read(opened(file), np.zeros(1, np.int64), rows(1), slice(None)).result(timeout=5)
        queues.close()
    assert not queues._idle


# -- in the store ------------------------------------------------------------------------------


def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the packs that are read directly from now on."""
    counts: list[int] = []
    real = KernelQueues.read

    def counted(self: KernelQueues, fd: int, offsets: np.ndarray, *a: Any, **k: Any) -> KernelRead:
        counts.append(len(offsets))
        return real(self, fd, offsets, *a, **k)

    monkeypatch.setattr(KernelQueues, "read", counted)
    return counts


def reads_through(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """Notes the reads through TensorStore, by a method of segments, from now on."""
    through: list[object] = []
    real = getattr(Segment, name)
    monkeypatch.setattr(Segment, name, lambda *a: through.append(a) or real(*a))
    return through


@pytest.mark.parametrize(
    "layout",
    [
        PAGES,
        APART,
        Layout(num_layers=7, num_kv_heads=2, head_dim=32, pack_layers=4, dtype="float32"),
        Layout(num_layers=4, num_kv_heads=2, head_dim=64, pack_layers=1, reordered=False),
        Layout(num_layers=4, num_kv_heads=2, head_dim=10, pack_layers=2),  # no whole pages
    ],
    ids=str,
)
def test_the_same_packs(
    folder: Path, queues: KernelQueues, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout.pack_bytes % FILE_ALIGN and queues.align == FILE_ALIGN:
        pytest.skip("the disk reads whole pages alone")
    counts, through = direct_reads(monkeypatch), reads_through(monkeypatch, "begin_packs")
    tokens = some_tokens(16 * 90 + 5)
    with ChunkStore.open(folder) as store:
        ingest(store, tokens[: 16 * 80], layout=layout)
        prefix = ingest(store, tokens, layout=layout)
        assert len(prefix.spans) == 2
        assert read_all(store, prefix).right == layout.groups * 91
        assert sum(counts[1:]) == layout.groups * 91  # the first one is the trial at open
        assert not through  # each was read from its own place, and none had to be read again
        with store.reader(prefix) as reader:  # in no order, over both segments
            ids = np.random.default_rng(0).permutation(91)
            out = aligned(91 * layout.pack_bytes).view(layout.numpy_dtype)
            out = out.reshape(91, *layout.pack_shape)
            assert reader.read_packs(1, ids, out).all()
            again = np.empty((1, *layout.pack_shape), layout.numpy_dtype)
            for row in (0, 45, 90):
                assert reader.read_packs(1, ids[row : row + 1], again).all()
                assert np.array_equal(again[0].view(np.uint8), out[row].view(np.uint8))


@pytest.mark.parametrize("probe", ["keys", "heads"])
@pytest.mark.parametrize("chunks", [1, 41, 701])
def test_the_same_probes(
    folder: Path, queues: KernelQueues, probe: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page, an odd number of them, and more than one piece; then one that is damaged."""
    layout = Layout(num_layers=2, num_kv_heads=4, head_dim=128, pack_layers=2, probe=probe)
    tokens = some_tokens(16 * chunks)
    with ChunkStore.open(folder) as store:
        counts, through = direct_reads(monkeypatch), reads_through(monkeypatch, "begin_probe")
        prefix = ingest(store, tokens, layout=layout)
        rows = len(tokens), layout.probe_heads, layout.head_dim
        out = aligned(np.prod(rows) * 2).view(layout.numpy_dtype).reshape(rows)
        unfit = np.empty(out.size + 8, layout.numpy_dtype)[8:].reshape(rows)
        with store.reader(prefix) as reader:
            for layer in layout.probe_layers:
                before, so_far = len(counts), len(through)
                assert reader.read_probe(layer, out) == len(tokens)
                assert len(counts) > before and len(through) == so_far  # read once
                assert reader.read_probe(layer, unfit) == len(tokens)
                assert np.array_equal(out.view(np.uint8), unfit.view(np.uint8))
            (shard,) = (folder / "segments").glob("*/*/probe/c.*")
            damage(shard, out[:1].nbytes * (len(tokens) - 5))
            assert reader.read_probe(layout.probe_layers[0], out) == len(tokens) - 16
            assert not out[-16:].view(np.uint8).any()


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_the_packs_of_one_call_are_asked_for_together(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 8 MiB of them: then the next ones are under way while these are checked."""
    most = (8 << 20) // PAGES.pack_bytes
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(16 * (most + 1)), layout=PAGES)
        memory = aligned((most + 1) * PAGES.pack_bytes).view(PAGES.numpy_dtype)
        out = memory.reshape(most + 1, *PAGES.pack_shape)
        counts = direct_reads(monkeypatch)
        with store.reader(prefix) as reader:
            for count in (64, most, most + 1):
                assert reader.read_packs(0, np.arange(count), out[:count]).all()
    assert counts == [64, most, most, 1]


@pytest.mark.parametrize("layout", [PAGES, APART], ids=["together", "apart"])
def test_memory_that_does_not_fit_goes_through_tensorstore(
    folder: Path, queues: KernelQueues, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch: none of it has to be looked at again by itself."""
    tokens, again = some_tokens(64), []
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens, layout=layout)
        counts = direct_reads(monkeypatch)
        reread = Segment.reread
        monkeypatch.setattr(Segment, "reread", lambda *a: again.append(a) or reread(*a))
        memory = aligned(4 * layout.pack_bytes + 16)[16:]
        out = memory.view(layout.numpy_dtype).reshape(4, *layout.pack_shape)
        with store.reader(prefix) as reader:
            for group in range(layout.groups):
                assert reader.read_packs(group, np.arange(4), out).all()
                truth = packs_of(layout, tokens, group, np.arange(64))
                assert np.array_equal(out.view(np.uint8), truth.view(np.uint8))
    assert not counts and not again


@pytest.mark.parametrize("direct", [True, False])
def test_the_same_pages_of_probes(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Directly, and then nothing is read twice; or where there are no direct reads."""
    layout = Layout(num_layers=2, num_kv_heads=4, head_dim=128, pack_layers=2)
    if not direct:
        monkeypatch.setattr(kernel_queue, "_CALLS", {})
    tokens = some_tokens(16 * 41 + 5)
    keys = np.ascontiguousarray(kv_of(layout, tokens)[:, 0]).view(np.uint8)
    through = reads_through(monkeypatch, "begin_probe")
    with ChunkStore.open(folder) as store:
        ingest(store, tokens[: 16 * 30], layout=layout)
        prefix = ingest(store, tokens, layout=layout)
        pages = ProbePages(prefix)
        assert len(prefix.spans) == 2 and len(pages) > 10
        ids = np.random.default_rng(0).permutation(len(pages))
        counts = direct_reads(monkeypatch)
        out = aligned(len(ids) * layout.pack_bytes).reshape(len(ids), layout.pack_bytes)
        with store.reader(prefix) as reader:
            for layer in layout.probe_layers:
                out[:] = 1
                assert reader.read_probe_pages(layer, pages, ids, out).all()
                for row, page in enumerate(ids):
                    start, count = pages.start[page], pages.tokens[page]
                    right = keys[layer, start : start + count].reshape(-1)
                    assert np.array_equal(out[row, : right.size], right)
                    assert not out[row, right.size :].any()
    wanted = len(pages) * len(layout.probe_layers)
    assert (sum(counts), len(through)) == ((wanted, 0) if direct else (0, wanted))


def test_a_probe_that_fails_as_it_is_read_directly_is_read_through_tensorstore(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the read, and says only later that there is nothing to be read."""
    layout = Layout(num_layers=2, num_kv_heads=4, head_dim=128, pack_layers=2)
    tokens = some_tokens(16 * 3)
    keys = np.ascontiguousarray(kv_of(layout, tokens)[:, 0]).view(np.uint8)
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, tokens, layout=layout)
        out = aligned(48 * 4 * 128 * 2).view(layout.numpy_dtype).reshape(48, 4, 128)
        monkeypatch.setattr(LocalFiles, "open_direct", lambda *_: os.open("/", os.O_RDONLY))
        counts = direct_reads(monkeypatch)
        with store.reader(prefix) as reader:
            for count, layer in enumerate(layout.probe_layers, 1):
                out[:] = 1
                assert reader.read_probe(layer, out) == 48
                assert len(counts) == count
                assert np.array_equal(out.view(np.uint8), keys[layer])
        assert store.stats()["unread"] == 0


@pytest.mark.parametrize("whole", [True, False], ids=["whole pages", "parts of pages"])
def test_packs_of_whole_pages_are_written_past_the_page_cache(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """And packs of no whole pages never: the disk would not take them all."""
    layout = PAGES if whole else SMALL
    past: list[int] = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        done = real(fd, data, offset)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            past.append(done)
        return done

    with ChunkStore.open(folder) as store:
        monkeypatch.setattr(os, "pwrite", pwrite)
        prefix = ingest(store, some_tokens(64), layout=layout)
        assert read_all(store, prefix).right == layout.groups * 4
    packs = layout.groups * 4 * layout.pack_bytes
    assert packs <= sum(past) if whole else not past


def test_queues_that_are_used_up(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel gives no queue, or takes no reads, TensorStore reads."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64), layout=PAGES)

        def refuse(self: KernelQueues, *_: object) -> int:
            raise OSError(errno.EAGAIN, "no more")

        monkeypatch.setattr(KernelQueues, "submit", refuse)
        assert read_all(store, prefix).right == PAGES.groups * 4
        monkeypatch.setattr(KernelQueues, "_check", refuse)
        assert read_all(store, prefix).right == PAGES.groups * 4
    with ChunkStore.open(folder) as store:
        assert read_all(store, prefix).right == PAGES.groups * 4


def test_other_systems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_queue, "_CALLS", {})
    with ChunkStore.open(folder) as store:
        assert read_all(store, ingest(store, some_tokens(64), layout=PAGES)).right == 8


def test_a_read_that_takes_too_long(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_reads(monkeypatch)
    with ChunkStore.open(folder, config=StoreConfig(deadline_s=1e-6)) as store:
        prefix = ingest(store, some_tokens(16 * 200), layout=PAGES)
        out = aligned(200 * PAGES.pack_bytes).view(PAGES.numpy_dtype)
        out = out.reshape(200, *PAGES.pack_shape)
        with store.reader(prefix) as reader:
            with pytest.raises(ReadTimeout, match=r"200 packs|a slow disk") as error:
                reader.read_packs(0, np.arange(200), out)
            while not error.value.settled():
                pass
            assert reader.read_packs(0, np.arange(200), out, deadline_s=5.0).all()
    assert store.gate.bytes == 0


@pytest.mark.parametrize("direct", [True, False])
def test_nothing_is_written_after_an_error(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """A check that fails in an unforeseen way, while other packs of the call are on their way."""
    if not direct:
        monkeypatch.setattr(kernel_queue, "_CALLS", {})
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(16 * 200), layout=PAGES)
        out = aligned(200 * PAGES.pack_bytes).view(PAGES.numpy_dtype)
        out = out.reshape(200, *PAGES.pack_shape)

        def out_of_memory(*_: object) -> np.ndarray:
            raise MemoryError

        monkeypatch.setattr(Segment, "packs_good", out_of_memory)
        with store.reader(prefix) as reader, pytest.raises(MemoryError):
            reader.read_packs(0, np.arange(200), out)
        assert not kernel_queue._IN_FLIGHT and store.gate.bytes == 0


@pytest.mark.parametrize("kind", ["flip data", "flip index", *corruption.SHARDS])
def test_faults_without_direct_reads(
    pristine: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`test_faults.py` reads directly where it can; here everything goes through TensorStore."""
    monkeypatch.setattr(kernel_queue, "_CALLS", {})
    sweep = corruption.flips if kind.startswith("flip") else corruption.shards
    tally = sweep(pristine, 4, kind)
    assert tally.ok and tally.caught, tally


def test_verify_reads_what_direct_reads_do_not_need(folder: Path, queues: KernelQueues) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64), layout=PAGES)
        shard = sorted((folder / "segments").glob("*/*/packs/c.0.*"))[0]
        data = bytearray(shard.read_bytes())
        data[-7] ^= 1  # of the shard's index, for other readers of zarr
        shard.write_bytes(data)
        assert read_all(store, prefix).right == PAGES.groups * 4
        assert not verify_store(store).ok


def test_a_fault_found_directly_is_read_again(folder: Path, queues: KernelQueues) -> None:
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(64), layout=PAGES)
        shard = sorted((folder / "segments").glob("*/*/packs/c.0.*"))[0]
        data = bytearray(shard.read_bytes())
        data[2 * PAGES.pack_bytes + 3] ^= 4
        shard.write_bytes(data)
        found = read_all(store, prefix)
        assert (found.right, found.refused, found.wrong) == (PAGES.groups * 4 - 1, 1, 0)
        again = store.longest_prefix(prefix.tokens, fingerprint=FINGERPRINT, layout=PAGES)
        assert again.num_tokens == 32


def test_calls_have_the_numbers_of_linux_tables() -> None:
    """io_setup, io_destroy, io_submit, io_getevents: `syscall_64.tbl`, `asm-generic/unistd.h`."""
    assert kernel_queue._CALLS == {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
