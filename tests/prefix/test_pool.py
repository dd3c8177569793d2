from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckv_jax.prefix.pools import PAGE_BYTES, HostPool, aligned_bytes, slots_for

SHAPE = (2, 2, 4, 1, 8)


def packs(n: int) -> np.ndarray:
    return np.arange(n * 128).reshape(n, *SHAPE).astype(ml_dtypes.bfloat16)


def test_packs_come_back_bit_for_bit() -> None:
    pool = HostPool(5, SHAPE, ml_dtypes.bfloat16)
    slots = np.array([4, 1, 2], np.int32)
    pool.write(slots, packs(3))
    out = np.empty((2, *SHAPE), ml_dtypes.bfloat16)
    pool.read(np.array([2, 4], np.int32), out)
    np.testing.assert_array_equal(out.view(np.uint16), packs(3)[[2, 0]].view(np.uint16))


def test_memory_starts_on_a_page_and_counts_its_bytes() -> None:
    pool = HostPool(3, SHAPE, np.float32)
    assert pool.packs.ctypes.data % PAGE_BYTES == 0
    assert pool.pack_bytes == 512 and pool.nbytes == 1536
    pool.close()
    assert pool.nbytes == 0
    assert aligned_bytes(0).size == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is mapped how")
@pytest.mark.parametrize("size", [3 * PAGE_BYTES, (4 << 20) - PAGE_BYTES, 4 << 20])
def test_memory_is_of_this_process_alone_and_large_pools_want_large_pages(size: int) -> None:
    memory = aligned_bytes(size)
    start, smaps = memory.ctypes.data, Path("/proc/self/smaps").read_text(encoding="utf-8")
    found = []  # of the mapping that begins there, or of one that the kernel joined it to
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        first, last = (int(end, 16) for end in part.split()[0].split("-"))
        if first <= start < last:
            kind, _, _, file = part.split()[1:5]
            found.append((kind, file, part.split("VmFlags:")[1].split()))
    ((kind, file, flags),) = found
    assert (kind, file) == ("rw-p", "0"), "it is of no file"
    assert "dc" in flags, "not for a forked process: reads into it may be under way"
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert ("hg" in flags) == (size == 4 << 20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: slots_for(-1, 4), "budget of -1"),
        (lambda: slots_for(4, 0), "packs of 0"),
        (lambda: HostPool(-1, SHAPE, np.float32), "-1 slots"),
        (lambda: HostPool(1, (), np.float32), "slot shape"),
        (lambda: HostPool(1, (2, 0), np.float32), "slot shape"),
        (
            lambda: HostPool(1, (2, 4), np.float32).write(
                np.zeros(1, np.int32), np.zeros((1, 2, 3), np.float32)
            ),
            "got packs float32",
        ),
        (
            lambda: HostPool(1, SHAPE, np.float32).read(
                np.array([-1], np.int32), np.zeros((1, *SHAPE), np.float32)
            ),
            "got slots -1",
        ),
        (lambda: HostPool(1, SHAPE, np.float32).write(np.zeros(1, np.int32), packs(1)), "bfloat16"),
        (
            lambda: HostPool(1, SHAPE, np.float32).read(
                np.array([1], np.int32), np.zeros((1, *SHAPE), np.float32)
            ),
            "got slots 1",
        ),
        (
            lambda: HostPool(1, SHAPE, np.float32).read(
                np.zeros(1, np.int32), np.zeros((1, *SHAPE), np.int32)
            ),
            "got out int32",
        ),
        (
            lambda: HostPool(1, SHAPE, np.float32).read(
                np.array([0], np.int32), np.zeros((2, *SHAPE), np.float32)
            ),
            "got out",
        ),
    ],
)
def test_misuse_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
