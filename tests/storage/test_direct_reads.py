"""What a store reads past TensorStore: the same bytes, and the same faults found."""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from segment_support import packs_memory, wait_until
from slow_reads import slow_reads

from ckv_jax.storage import ChunkStore, Layout, ReadTimeout, StoreConfig
from ckv_jax.storage.place import kernel_queue
from ckv_jax.storage.place.disk import may_be_left_behind
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues, KernelRead
from ckv_jax.storage.place.local import LocalFiles
from ckv_jax.storage.prefix import ProbePages
from ckv_jax.storage.segment.arrays import aligned
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.segment import Segment
from tests.support.truth import ingest, kv_of, read_all, read_probe, some_tokens

PAGES = Layout(
    num_layers=4, num_kv_heads=2, head_dim=32, pack_layers=2, digest="int4", probe="keys"
)
"""Packs of two pages: small, and read directly."""
APART = Layout(
    num_layers=3, num_kv_heads=4, head_dim=32, pack_layers=1, kv_together=False, probe="keys"
)
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
        Layout(
            num_layers=7, num_kv_heads=2, head_dim=32, pack_layers=4, dtype="float32", probe="keys"
        ),
        Layout(
            num_layers=4, num_kv_heads=2, head_dim=64, pack_layers=1, reordered=False, probe="keys"
        ),
        Layout(
            num_layers=7, num_kv_heads=2, head_dim=64, digest="int4", short_last=True, probe="keys"
        ),
        # no whole pages
        Layout(num_layers=4, num_kv_heads=2, head_dim=10, pack_layers=2, probe="keys"),
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
            out = packs_memory(layout, 91)
            assert reader.read_packs(1, ids, out).all()
            again = np.empty((1, *layout.pack_shape), layout.numpy_dtype)
            for row in (0, 45, 90):
                assert reader.read_packs(1, ids[row : row + 1], again).all()
                assert np.array_equal(again[0].view(np.uint8), out[row].view(np.uint8))
            counts.clear()
            through.clear()
            size = layout.numpy_dtype.itemsize
            memory = aligned(layout.pack_bytes + size)[size:].view(layout.numpy_dtype)
            unfit = memory.reshape(1, *layout.pack_shape)  # where the kernel reads nothing to
            assert reader.read_packs(1, ids[:1], unfit).all()
            assert len(through) == 1 and not counts
            assert np.array_equal(unfit[0].view(np.uint8), out[0].view(np.uint8))


@pytest.mark.parametrize("direct", [True, False])
def test_the_same_pages_of_probes(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Directly, and then nothing is read twice; or where there are no direct reads."""
    layout = Layout(num_layers=2, num_kv_heads=4, head_dim=128, pack_layers=2, probe="keys")
    if not direct:
        monkeypatch.setattr(kernel_queue, "_CALLS", {})
    tokens = some_tokens(16 * 41 + 5)
    keys = np.ascontiguousarray(kv_of(layout, tokens)[:, 0]).view(np.uint8)
    through = reads_through(monkeypatch, "begin_part")
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
    layout = Layout(num_layers=2, num_kv_heads=4, head_dim=128, pack_layers=2, probe="keys")
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


def test_a_read_that_takes_too_long(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_reads(monkeypatch)
    with ChunkStore.open(folder, config=StoreConfig(deadline_s=1e-6)) as store:
        prefix = ingest(store, some_tokens(16 * 200), layout=PAGES)
        out = packs_memory(PAGES, 200)
        with store.reader(prefix) as reader:
            with pytest.raises(ReadTimeout, match=r"200 packs|a slow disk") as error:
                reader.read_packs(0, np.arange(200), out)
            wait_until(error.value.settled)
        with store.reader(prefix, deadline_s=30) as reader:
            assert reader.read_packs(0, np.arange(200), out).all()
    assert store.gate.enter(1 << 40, 30)  # nothing is in flight any more, soon


def test_a_kernel_that_does_not_say_what_has_landed_is_a_read_that_is_late(
    folder: Path, queues: KernelQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error says nothing of what is in flight: the buffer rests until the kernel says so."""
    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(16 * 20), layout=PAGES)
        out = packs_memory(PAGES, 20)
        with store.reader(prefix) as reader, monkeypatch.context() as patch:
            patch.setattr(KernelQueues, "events", Mock(side_effect=OSError(errno.EIO, "broken")))
            with pytest.raises(ReadTimeout) as error:
                reader.read_packs(0, np.arange(20), out)
            assert not error.value.settled() and not error.value.settled()
            patch.undo()
            wait_until(error.value.settled)
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
        out = packs_memory(PAGES, 200)
        monkeypatch.setattr(Segment, "packs_good", Mock(side_effect=MemoryError))
        with store.reader(prefix) as reader, pytest.raises(MemoryError):
            reader.read_packs(0, np.arange(200), out)
        assert not kernel_queue._IN_FLIGHT
        assert store.gate.enter(1 << 40, 30)  # told by TensorStore's threads, soon


def test_what_a_read_calls_does_not_grow_with_its_packs(folder: Path, queues: KernelQueues) -> None:
    """Python's and C's calls of one read, in a thread like the prefetcher's."""

    def calls_of(reader: PrefixReader, packs: int) -> int:
        ids, out = np.arange(packs) * 2, packs_memory(PAGES, packs)  # no two lie together
        reader.read_packs(0, ids, out)
        counts = Counter[str]()
        sys.setprofile(lambda _, event, __: counts.update([event]))
        reader.read_packs(0, ids, out)
        sys.setprofile(None)
        return counts["call"] + counts["c_call"]

    with ChunkStore.open(folder) as store:
        prefix = ingest(store, some_tokens(16 * 100), layout=PAGES)
        with (
            store.reader(prefix) as reader,
            ThreadPoolExecutor(1, initializer=may_be_left_behind) as thread,
        ):
            few, many = (thread.submit(calls_of, reader, packs).result() for packs in (2, 50))
    assert few <= 70 and many <= few + 3 * 20  # it may look again for what landed later
