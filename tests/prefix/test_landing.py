"""Room for reads: how much there is, who gets it, and when it comes back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_targets import CPU

from ckv_jax.config import EngineConfig
from ckv_jax.prefix.landing import HostBlocks, InPool, Room, landing_for
from ckv_jax.prefix.memory import Memory, job_packs
from ckv_jax.prefix.pools import MappedPool
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.systems import SYSTEMS
from tests.support.truth import SMALL

SLOTS = 8
PACKS = job_packs(SMALL)
SYSTEM = replace(SYSTEMS["ckv"], chunk_tokens=SMALL.chunk_tokens)


def memory(slots: int = SLOTS) -> Memory:
    """Eight work slots and no caches."""
    config = EngineConfig(
        device_cache_bytes=0, host_cache_bytes=0, prefetch_device_bytes=slots * SMALL.pack_bytes
    )
    return Memory(SMALL, config, SYSTEM, CPU)


def blocks(count: int) -> HostBlocks:
    """A landing by way of so many host blocks."""
    return HostBlocks(memory(), SMALL, count * PACKS * SMALL.stored_bytes, None)


def taken(landing: HostBlocks | InPool, n: int) -> Room:
    room = landing.take(n, demand=True)
    assert room is not None
    return room


def test_demand_has_every_block_and_speculation_what_is_left_beyond_those_spared() -> None:
    landing = blocks(3)
    assert landing.take(1, demand=False, spare=3 * PACKS) is None
    first = landing.take(1, demand=False, spare=2 * PACKS)
    assert first is not None  # of three blocks two are left
    assert landing.take(1, demand=False, spare=2 * PACKS) is None
    assert landing.take(1, demand=False, spare=PACKS + 1) is None  # a block and a pack are two
    second, third = taken(landing, 1), taken(landing, 1)
    assert landing.take(1, demand=True) is None
    landing.give_back(second, None)
    assert taken(landing, 1).array is second.array  # no block is made for it
    landing.give_back(third, lambda: False)  # its read may still write
    assert landing.take(1, demand=True) is None


def test_half_of_the_work_slots_are_for_steps_and_one_at_least() -> None:
    assert [memory(slots).hold_slots for slots in (1, 2, 3, 8)] == [0, 1, 2, 4]
    config = EngineConfig(prefetch_device_bytes=SMALL.pack_bytes - 1)
    with pytest.raises(ValueError, match="expected room for at least one chunk"):
        Memory(SMALL, config, SYSTEM, CPU)


def test_there_is_one_block_at_least_and_none_is_made_while_one_is_free() -> None:
    assert taken(blocks(0), 1).array.nbytes == PACKS * SMALL.stored_bytes
    landing = blocks(3)
    first = taken(landing, 1)
    landing.give_back(first, None)
    assert taken(landing, 1).array is first.array
    landing.give_back(first, None)
    assert landing.force(1).array is first.array


def test_a_block_comes_back_once_its_read_has_ended() -> None:
    landing, ended = blocks(1), [False]
    room = taken(landing, 1)
    landing.give_back(room, lambda: ended[0])
    assert landing.take(1, demand=True) is None
    ended[0] = True
    assert taken(landing, 1).array is room.array


def test_a_block_too_many_goes_with_its_read() -> None:
    landing = blocks(1)
    room, more = taken(landing, 1), landing.force(1)
    landing.give_back(more, None)
    assert landing.take(1, demand=True) is None
    landing.give_back(room, None)
    assert taken(landing, 1).array is room.array
    assert landing.take(1, demand=True) is None


def in_pool(host_packs: int) -> tuple[InPool, Memory]:
    own = memory()
    landing = landing_for(own, SMALL, host_bytes=host_packs * SMALL.pack_bytes)
    assert isinstance(landing, InPool) and isinstance(own.pool, MappedPool)
    return landing, own


def test_reads_land_in_slots_up_to_three_in_four_and_then_in_host_memory() -> None:
    landing, own = in_pool(2)
    rooms = [taken(landing, 3), taken(landing, 3)]
    assert all(np.shares_memory(room.array, own.pool.packs) for room in rooms)  # type: ignore[union-attr]
    apart = taken(landing, 2)
    assert not np.shares_memory(apart.array, own.pool.packs)  # type: ignore[union-attr]
    assert landing.take(1, demand=True) is None  # nothing is left of the host's either
    landing.give_back(apart, None)
    assert taken(landing, 2).array.nbytes == 2 * SMALL.pack_bytes
    with pytest.raises(PoolExhausted):
        own.take(3)


def test_host_memory_whose_read_may_still_write_comes_back_once_it_has_ended() -> None:
    landing, _ = in_pool(2)
    taken(landing, 3), taken(landing, 3)  # slots are not to be had
    apart, ended = taken(landing, 2), [False]
    landing.give_back(apart, lambda: ended[0])
    assert landing.take(2, demand=True) is None
    ended[0] = True
    assert taken(landing, 2).array is not apart.array
    assert landing.take(1, demand=True) is None  # it came back once


def test_slots_whose_read_may_still_write_are_nobody_elses() -> None:
    landing, own = in_pool(0)
    room, ended = taken(landing, 3), [False]
    landing.give_back(room, lambda: ended[0])
    assert own.abandoned == 3 and own.free_slots == SLOTS - 3
    assert own.step_slots == SLOTS - 3
    ended[0] = True
    own.reclaim()
    assert own.abandoned == 0 and own.free_slots == SLOTS


def test_slots_whose_read_has_ended_are_free_at_once() -> None:
    landing, own = in_pool(0)
    for settled in (None, lambda: True):
        landing.give_back(taken(landing, 3), settled)
        assert own.abandoned == 0 and own.free_slots == SLOTS


def test_slots_that_were_filled_or_given_back_are_in_flight_no_longer() -> None:
    landing, own = in_pool(0)
    for turn in range(4):
        room = taken(landing, 6)  # as many as may be in flight
        if turn % 2:
            landing.give_back(room, None)
        else:
            own.tiers.release(landing.place(room, np.arange(6)))
        assert own.free_slots == SLOTS


def test_speculation_leaves_slots_to_spare() -> None:
    landing, own = in_pool(0)
    assert landing.take(3, demand=False, spare=6) is None
    assert landing.take(3, demand=False, spare=5) is not None
    assert own.free_slots == 5


def test_what_was_not_good_is_free_and_the_rest_is_in_its_slots() -> None:
    landing, own = in_pool(2)
    room = taken(landing, 3)
    slots = landing.place(room, np.array([0, 2]))
    np.testing.assert_array_equal(slots, room.rows[[0, 2]])
    assert own.free_slots == SLOTS - 2
    apart = landing.force(2)
    apart.array[...] = 1
    slots = landing.place(apart, np.array([1]))
    assert own.free_slots == SLOTS - 3
    assert (own.pool.packs[slots] == 1).all()  # type: ignore[union-attr]
    assert taken(landing, 2).array.nbytes  # and its room in host memory is free again
