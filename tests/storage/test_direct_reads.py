"""What a store reads past TensorStore: the same bytes, and the same faults found."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_reads import slow_reads

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
from ckv_jax.storage.prefix import ProbePages
from ckv_jax.storage.segment.arrays import aligned
from ckv_jax.storage.segment.segment import Segment
from tests.faults import corruption
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

PAGES = Layout(num_layers=4, num_kv_heads=2, head_dim=32, pack_layers=2, digest="int8")
"""Packs of two pages: small, and read directly."""
APART = Layout(num_layers=3, num_kv_heads=4, head_dim=32, pack_layers=1, kv_together=False)
"""Packs of keys and packs of values."""


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
        out = np.empty((48, 4, 128), layout.numpy_dtype)
        monkeypatch.setattr(LocalFiles, "open_direct", lambda *_: os.open("/", os.O_RDONLY))
        counts = direct_reads(monkeypatch)
        with store.reader(prefix) as reader:
            for count, layer in enumerate(layout.probe_layers, 1):
                out[:] = 1
                assert read_probe(reader, layer, out) == 48
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
        monkeypatch.setattr(kernel_queue, "_SPARE", [])
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
            until = time.monotonic() + 30
            while not error.value.settled():
                assert time.monotonic() < until
                time.sleep(0.001)
            assert reader.read_packs(0, np.arange(200), out, deadline_s=30).all()
    assert store.gate.enter(1 << 40, 30)  # nothing is in flight any more, soon


def test_a_kernel_that_does_not_say_what_has_landed_is_a_read_that_is_late(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error says nothing of what is in flight: the buffer rests until the kernel says so."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(16 * 20), layout=PAGES)
        out = aligned(20 * PAGES.pack_bytes).view(PAGES.numpy_dtype)
        out = out.reshape(20, *PAGES.pack_shape)
        with store.reader(prefix) as reader, monkeypatch.context() as patch:

            def fail(*_: object) -> int:
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(KernelQueues, "events", fail)
            with pytest.raises(ReadTimeout) as error:
                reader.read_packs(0, np.arange(20), out)
            assert not error.value.settled() and not error.value.settled()
            patch.undo()
            until = time.monotonic() + 30
            while not error.value.settled():
                assert time.monotonic() < until
            assert reader.read_packs(0, np.arange(20), out).all()
        assert store.stats()["quarantined"] == 0


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
        assert not kernel_queue._IN_FLIGHT
        assert store.gate.enter(1 << 40, 30)  # told by TensorStore's threads, soon


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
