"""What a batch reads, counts and gives back, over real pools and threads and a reader in memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_targets import CPU

from ckv_jax.config import EngineConfig
from ckv_jax.prefix.landing import landing_for
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.packs import Packs
from ckv_jax.prefix.pools import MappedPool
from ckv_jax.prefix.prefetcher import Prefetcher
from ckv_jax.storage.layout import Layout
from ckv_jax.systems import SYSTEMS
from ckv_jax.trace import Trace

from .slow_reader import PACK_BYTES, SHAPE, SlowReader, content

LAYOUT = Layout(
    num_layers=4, num_kv_heads=1, head_dim=8, chunk_tokens=4, pack_layers=1, dtype="float32"
)
CHUNKS = 8
AGAIN = 0.5
"""What is added to a pack that is computed again."""


class Recomputed:
    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        out = np.zeros((len(chunks), *SHAPE), np.float32)
        for row, chunk in zip(out, chunks.tolist(), strict=True):
            row[:] = content(group, chunk) + AGAIN
        return out


class Place:
    """The pools, one thread, and one prefix of eight chunks."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self.prefetcher = prefetcher
        self.reader = SlowReader()
        self.trace = Trace()
        self.open(12)

    def open(self, slots: int, *, device: int = 0, host: int = 0) -> None:
        """Makes pools anew: slots for work, and of caches."""
        sizes = {"prefetch_device_bytes": slots, "device_cache_bytes": device,
                 "host_cache_bytes": host}  # fmt: skip
        config = EngineConfig(**{name: n * PACK_BYTES for name, n in sizes.items()})  # type: ignore[arg-type]
        self.memory = Memory(LAYOUT, config, SYSTEMS["ckv"], CPU)
        self.first = self.memory.tiers.register(LAYOUT.groups * CHUNKS)

    def packs(self, kind: Any = "pack") -> Packs:
        self.trace = Trace()
        source: Any = SimpleNamespace(
            kind=kind,
            groups=LAYOUT.groups,
            reader=self.reader,
            recovered=Recomputed(),
            prefix=SimpleNamespace(layout=LAYOUT, id="some"),
            first_page=self.first + np.arange(CHUNKS),
            page_stride=np.full(CHUNKS, CHUNKS),
            read_bytes=lambda chunks: len(chunks) * PACK_BYTES,
        )
        landing = landing_for(self.memory, LAYOUT, host_bytes=0)
        return Packs([source], memory=self.memory, landing=landing, prefetcher=self.prefetcher,
                     trace=self.trace)  # fmt: skip

    def found(self, slots: np.ndarray) -> list[float]:
        """What each of these slots is filled with."""
        assert isinstance(self.memory.pool, MappedPool)
        return [float(pack.min()) for pack in self.memory.pool.packs[slots]]

    def read(self) -> list[tuple[int, list[int]]]:
        """(layer group, chunks) of all reads that have begun."""
        return self.reader.calls

    def hold(self) -> None:
        """Reads do not end, until `go_on`."""
        self.reader.gate.clear()

    def go_on(self) -> None:
        self.reader.gate.set()


@pytest.fixture
def place() -> Iterator[Place]:
    with Prefetcher(1) as prefetcher:
        made = Place(prefetcher)
        yield made
        made.go_on()


def some(*chunks: int) -> np.ndarray:
    return np.array(chunks, np.int64)


@pytest.mark.parametrize(("early", "covered"), [(False, 2), (True, 0)])
def test_what_was_read_ahead_and_not_sure_to_be_demanded_is_covered(
    place: Place, early: bool, covered: int
) -> None:
    with place.packs() as packs:
        packs.ahead(0, 1, some(0, 1, 2), early=early)
        assert packs.demand(0, 1, some(1, 2, 3)) == 3
        assert packs.demand(0, 1, some(1, 2, 3)) == 0  # on its way already, and counted
        assert place.found(packs.collect(0, 1, some(3, 1, 2))) == [1003, 1001, 1002]
    assert (place.trace.counters["demanded"], place.trace.counters["covered"]) == (3, covered)
    assert place.read() == [(1, [0, 1, 2]), (1, [3])]
    assert place.trace.bytes["ssd"] == 4 * PACK_BYTES
    assert place.trace.bytes["unused"] == PACK_BYTES
    assert place.memory.free_slots == 12 and place.memory.users == []


def test_only_packs_to_attend_to_count_as_demanded(place: Place) -> None:
    with place.packs("probe") as packs:
        assert packs.demand(0, 2, some(4)) == 1
        packs.collect(0, 2, some(4), stage="probe_io")
    assert place.trace.counters == {}
    spans = [(span.name, span.lane, span.args) for span in place.trace.spans]
    assert ("probe_io", "host", {"chunks": 1}) in spans
    assert [name for name, lane, _ in spans if lane == "ssd"] == ["probe_read"]


@pytest.mark.parametrize(("slots", "begun"), [(9, 3), (8, 0)])
def test_reading_ahead_leaves_room_for_two_demands_of_its_size(
    place: Place, slots: int, begun: int
) -> None:
    place.open(slots)
    with place.packs() as packs:
        place.hold()
        packs.ahead(0, 0, some(5, 6, 7))
        assert place.memory.free_slots == slots - begun
        place.go_on()


@pytest.mark.parametrize(("slots", "begun"), [(3, 1), (4, 2), (5, 3)])
def test_packs_that_are_not_wanted_together_are_read_one_by_one(
    place: Place, slots: int, begun: int
) -> None:
    place.open(slots)
    with place.packs() as packs:
        packs.near_misses(0, 0, some(5, 6, 7))
        assert place.memory.free_slots == slots - begun
        packs.demand(0, 0, some(*range(5, 5 + begun)))
        packs.collect(0, 0, some(*range(5, 5 + begun)))
    assert place.read() == [(0, [chunk]) for chunk in range(5, 5 + begun)]


def test_nothing_is_read_ahead_twice(place: Place) -> None:
    place.open(16)
    with place.packs() as packs:
        packs.ahead(0, 0, some(0, 1))
        packs.ahead(0, 0, some(1, 2))  # one is on its way
        packs.demand(0, 0, some(0, 1))
        packs.collect(0, 0, some(0, 1))
        packs.ahead(0, 0, some(0, 1))  # they are there
        packs.demand(0, 0, some(2))
        packs.collect(0, 0, some(2))
    assert place.read() == [(0, [0, 1]), (0, [2])]


def test_what_could_not_be_read_is_computed_again_and_its_chunks_counted_once(
    place: Place,
) -> None:
    place.reader.bad = frozenset({1, 4})
    with place.packs() as packs:
        for group, chunks in ((0, some(1, 2, 4)), (3, some(4, 5))):
            packs.demand(0, group, chunks)
            found = place.found(packs.collect(0, group, chunks))
            wanted = [content(group, c) + AGAIN * (c in (1, 4)) for c in chunks.tolist()]
            assert found == wanted
    assert place.trace.counters["recomputed_packs"] == 3
    assert place.trace.recomputed_chunks == 2 == place.trace.of("some", "recomputed_chunks")


def test_what_finds_no_room_is_read_when_it_is_collected(place: Place) -> None:
    """And not before the call that reads the slots has ended."""
    place.open(4)
    calls: list[str] = []
    call: Any = SimpleNamespace(
        is_ready=lambda: bool(calls), block_until_ready=lambda: calls.append("ended")
    )
    with place.packs() as packs:
        packs.demand(0, 0, some(0, 1, 2))
        assert packs.demand(0, 1, some(0, 1, 2)) == 3
        assert packs.demand(0, 2, some(7)) == 1
        packs.collect(0, 0, some(0, 1, 2))
        packs.done(0, 0, call)
        assert packs.demand(0, 3, some(1, 2)) == 2
        assert calls == []
        assert place.found(packs.collect(0, 1, some(0, 1, 2))) == [1000, 1001, 1002]
        assert calls == ["ended"]
        assert place.found(packs.collect(0, 2, some(7))) == [2007]
        packs.done(0, 1, call)
        assert place.found(packs.collect(0, 3, some(1, 2))) == [3001, 3002]
        with pytest.raises(ValueError, match="got 1 packs to collect that were not demanded"):
            packs.collect(0, 3, some(0))
    assert all(span.args["demanded"] for span in place.trace.spans if span.lane == "ssd")
    assert place.memory.free_slots == 4


def test_who_comes_later_does_not_overtake_who_waits_for_room(place: Place) -> None:
    place.open(4)  # three of which may be read into at a time
    with place.packs("probe") as packs:
        place.hold()
        packs.demand(0, 3, some(0))
        packs.demand(0, np.array([0, 0, 0, 1]), some(0, 1, 2, 0))
        assert place.memory.free_slots == 3
        place.go_on()
        packs.collect(0, 3, some(0))
        assert place.found(packs.collect(0, np.array([0, 1]), some(2, 0))) == [2, 1000]


def test_what_waits_for_room_is_not_read_ahead_as_well(place: Place) -> None:
    place.open(8)
    call: Any = SimpleNamespace(block_until_ready=lambda: None)
    with place.packs() as packs:
        packs.demand(0, 0, some(0, 1, 2, 3, 4))
        packs.demand(0, 1, some(5, 6))
        packs.collect(0, 0, some(0, 1, 2, 3, 4))
        packs.give_up(0, 0, call)
        packs.ahead(0, 1, some(6))
        assert place.memory.free_slots == 8
        packs.collect(0, 1, some(5, 6))
    assert place.read() == [(0, [0, 1, 2, 3, 4]), (1, [5, 6])]


def test_a_group_that_is_done_stays_while_there_is_room(place: Place) -> None:
    place.open(8)
    call: Any = SimpleNamespace(is_ready=lambda: True)
    with place.packs() as packs:
        packs.demand(0, 0, some(0, 1, 2, 3))
        packs.collect(0, 0, some(0, 1, 2, 3))
        packs.done(0, 0, call)
        packs.demand(0, 1, some(4, 5, 6, 7))
        assert place.memory.free_slots == 0
        packs.demand(0, 2, some(0))
        assert place.memory.free_slots == 3
        packs.collect(0, np.array([1, 1, 2]), some(4, 7, 0))


def test_a_group_that_is_given_up_waits_for_its_last_call(place: Place) -> None:
    ended: list[str] = []
    call: Any = SimpleNamespace(block_until_ready=lambda: ended.append("call"))
    with place.packs() as packs:
        for group in (0, 1):
            packs.demand(0, group, some(0, 1))
            packs.collect(0, group, some(0, 1))
        packs.give_up(0, 0, call)
        assert ended == ["call"] and place.memory.free_slots == 10
        assert packs.demand(0, 1, some(0, 1)) == 0 and packs.demand(0, 0, some(0)) == 1
        assert place.found(packs.collect(0, 0, some(0))) == [0]


def test_who_gives_way_ends_the_last_groups_reads_first_and_no_more_than_it_takes(
    place: Place,
) -> None:
    with place.packs() as packs:
        place.hold()
        packs.demand(0, 3, some(6))  # runs
        assert place.reader.started.acquire(timeout=10)
        packs.near_misses(0, np.repeat([1, 2, 0], 2), some(0, 1, 0, 1, 0, 1))
        assert place.memory.free_slots == 5
        place.go_on()  # who ends a read that runs waits for it
        packs.give_way(8)
        assert place.memory.free_slots == 8
        packs.give_way(8)
        assert place.memory.free_slots == 8
        assert packs.demand(0, 2, some(0, 1)) == 2
        assert place.trace.counters["covered"] == 0
        packs.demand(0, 1, some(0, 1))
        assert place.trace.counters["covered"] == 2
        assert place.found(packs.collect(0, 3, some(6))) == [3006]  # begins again


def test_who_gives_way_waits_for_the_call_that_reads_its_slots(place: Place) -> None:
    ended: list[str] = []
    call: Any = SimpleNamespace(
        is_ready=lambda: bool(ended), block_until_ready=lambda: ended.append("call")
    )
    with place.packs() as packs:
        packs.demand(0, 0, some(0, 1))
        packs.collect(0, 0, some(0, 1))
        packs.done(0, 0, call)
        packs.give_way(10)
        assert ended == [] and place.memory.free_slots == 10
        packs.give_way(11)
        assert ended == ["call"] and place.memory.free_slots == 12


def test_guesses_that_turn_out_wrong_are_not_read(place: Place) -> None:
    with place.packs() as packs:
        place.hold()
        packs.near_misses(0, 0, some(0))
        assert place.reader.started.acquire(timeout=10)
        packs.near_misses(0, np.array([0, 0, 0, 1]), some(1, 2, 3, 4))
        packs.demand(0, 0, some(3))
        assert place.memory.free_slots == 12 - 5
        packs.near_misses(0, 0, some(2))  # not that which runs, nor what is demanded
        assert place.memory.free_slots == 12 - 3
        place.go_on()
        packs.demand(0, 0, some(2))
        packs.collect(0, 0, some(2, 3))
        packs.demand(0, 1, some(4))
        packs.collect(0, 1, some(4))
    assert sorted(place.read()) == [(0, [0]), (0, [2]), (0, [3]), (1, [4])]
    assert place.trace.bytes["unused"] == PACK_BYTES  # of the one that ran


@pytest.mark.parametrize("where", ["device", "host"])
def test_what_is_cached_is_not_read_again(place: Place, where: str) -> None:
    place.open(8, **{where: 4})
    for again in (False, True):
        with place.packs() as packs:
            assert packs.demand(0, 2, some(0, 3, 5)) == (0 if again else 3)
            slots = packs.collect(0, 2, some(0, 3, 5))
            assert place.found(slots) == [2000, 2003, 2005]
            place.memory.tiers.record(place.first + 16 + some(0, 3, 5), np.ones(3))
    assert place.read() == [(2, [0, 3, 5])]
    moved = {name: size for name, size in place.trace.bytes.items() if size}
    assert moved == {where: 3 * PACK_BYTES}
    assert ("stage" in {span.name for span in place.trace.spans}) == (where == "host")
    assert place.memory.tiers.pinned_slots == 0


def test_counts_go_to_the_latest_trace(place: Place) -> None:
    other = Trace()
    with place.packs() as packs:
        packs.demand(0, 0, some(0))
        packs.report_to(other)
        packs.demand(0, 0, some(1))
        packs.collect(0, 0, some(0, 1))
    assert place.trace.counters["demanded"] == other.counters["demanded"] == 1


def test_a_near_miss_that_was_read_is_kept_where_there_is_room(place: Place) -> None:
    place.open(12, device=2)
    for unused in (2, 0):
        with place.packs() as packs:
            packs.near_misses(0, np.array([1, 2]), some(3, 4))
            for job, _ in list(packs._begun.values()):
                place.prefetcher.wait(job)
            packs.near_misses(0, 0, some())
        assert place.trace.bytes["unused"] == unused * PACK_BYTES
    assert sorted(place.read()) == [(1, [3]), (2, [4])]
    assert place.memory.tiers.device_pages == 2
    assert place.memory.free_slots == place.memory.tiers.slots - 2
