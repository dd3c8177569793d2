"""Packs land in the slots they were sent to, and nowhere else."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from kernel_targets import CPU

from ckv_jax.prefix.memory import device_room
from ckv_jax.prefix.pools import STAGING_ROWS, DevicePool, HostPool, MappedPool, aligned_bytes

SHAPE = (2, 2, 4, 8)
DTYPES = [np.float32, ml_dtypes.bfloat16]


def packs(n: int, dtype: object, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, *SHAPE)).astype(dtype)


def content(pool: DevicePool, dtype: object) -> np.ndarray:
    return np.asarray(pool.pages).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_and_read_are_bit_exact(dtype: object) -> None:
    pool = DevicePool(7, SHAPE, np.dtype(dtype), CPU)
    rows = packs(4, dtype)
    pool.write(rows, np.array([6, -1, 0, 3])).block_until_ready()
    expected = np.zeros((7, *SHAPE), dtype)
    expected[[6, 0, 3]] = rows[[0, 2, 3]]
    np.testing.assert_array_equal(content(pool, dtype), expected)
    back = np.asarray(pool.read(np.array([3, 6, 0])))[:3].view(dtype)
    np.testing.assert_array_equal(back, rows[[3, 0, 2]])


def test_a_write_takes_the_memory_of_the_pages_before() -> None:
    """The array of all packs is not copied."""
    pool = DevicePool(3, SHAPE, np.dtype(np.float32), CPU)
    before = pool.pages
    pool.write(packs(1, np.float32), np.array([1])).block_until_ready()
    assert before.is_deleted() and not pool.pages.is_deleted()
    pool.close()


def test_staging_moves_scattered_host_packs_in_blocks() -> None:
    dtype = np.dtype(ml_dtypes.bfloat16)
    count, moved = 3 * STAGING_ROWS, 2 * STAGING_ROWS + 5
    pool, host = DevicePool(count, SHAPE, dtype, CPU), HostPool(count, SHAPE, dtype)
    host.packs[:] = packs(count, dtype)
    order = np.random.default_rng(1).permutation(count).astype(np.int32)[:moved]
    assert pool.load(host, order, order[::-1].copy()) == moved * host.pack_bytes
    expected = np.zeros((count, *SHAPE), dtype)
    expected[order[::-1]] = packs(count, dtype)[order]
    np.testing.assert_array_equal(content(pool, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mapped_pool_is_the_memory_that_is_read_into(dtype: object) -> None:
    pool, host = MappedPool(7, SHAPE, np.dtype(dtype), CPU), HostPool(3, SHAPE, dtype)
    pages = pool.pages
    pool.packs[5] = packs(1, dtype)[0]
    pool.write(packs(3, dtype, 1), np.array([6, -1, 0]))
    pool.save(host, np.array([5, 6]), np.array([2, 0]))
    assert pool.load(host, np.array([2]), np.array([3])) == host.pack_bytes
    expected = np.zeros((7, *SHAPE), dtype)
    expected[[5, 3]] = packs(1, dtype)[0]
    expected[[6, 0]] = packs(3, dtype, 1)[[0, 2]]
    np.testing.assert_array_equal(np.asarray(pages).view(dtype), expected)
    assert not pages.committed  # with what is computed from it nothing is compiled anew


def test_the_fullest_device_says_what_is_left() -> None:
    class Device:
        def __init__(self, **stats: int) -> None:
            self._stats = stats

        def memory_stats(self) -> dict[str, int] | None:
            return self._stats or None

    two = [Device(bytes_limit=100, bytes_in_use=used) for used in (30, 90)]
    assert device_room(two) == 10
    assert device_room([*two, Device()]) is None  # a CPU
    assert device_room([Device(bytes_in_use=3)]) is None
    assert device_room(jax.devices()) is None


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is mapped how")
@pytest.mark.parametrize("size", [3 * mmap.PAGESIZE, (4 << 20) - mmap.PAGESIZE, 4 << 20])
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
