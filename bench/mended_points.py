"""The points of mending the rivals that `bench.mended` puts back, and who is asked with each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.common import Json
from bench.lab import Lab
from bench.put_back import (
    Memory,
    all_rows_fall_back,
    keys_speculated,
    probes_from_disk,
)
from bench.turns import DEVICE_SHARE, HOST_SHARE, equal_memory
from ckv_jax import Engine
from ckv_jax.config import SystemConfig
from ckv_jax.systems import system_named

AT_ONCE = 4
"""Questions of a batch of which some fall back."""
FALLS_BACK = 0.5
"""Budget of those batches: of those measured (`bench.ttft`), the one at which most layers do."""

POINTS: Mapping[int, str] = {
    1: "IMPRESS probes the keys of three query heads; before: of three KV heads",
    2: "probe keys are in the caches; before: read from SSD by every request",
    3: "reordering again and again, a layer at a time, done before a request; before: as said",
    4: "a question of a batch falls back alone; before: all questions with it",
    5: "H2O's keys are sure reads of all threads; before: speculation",
    6: "buffers and digests are paid from the caches' memory; before: beside it",
}
NOT_PUT_BACK: tuple[Json, ...] = (
    {
        "point": 3,
        "what": "one order for all layers",
        "why": "the reorderer writes an order for each layer and nothing else; what that saves is "
        "`reordered_by_layer` beside `reordered` in bench/results/similarity.json",
    },
    {
        "point": 7,
        "what": "chunk scores by a softmax over prefix and suffix",
        "why": "a softmax over the prefix alone was kept, as right answers are as many "
        "(docs/rivals.md has both figures), so that nothing is to be put back; a score of one's "
        "own (`Select.score`) is given no keys of the suffix. No other byte would be read, and as "
        "many more keys scored as a suffix has: 32 beside 5,000",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way that a system is asked."""

    system: SystemConfig
    open: Callable[[Lab, SystemConfig, Memory], Engine]
    beside: bool = False
    """Buffers and digests lie beside the caches' memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sides of one system that take turns: as it is, and by point with that point put back."""

    system: str
    temperature: str
    points: tuple[int, ...]
    at_once: int = 1
    budget: float | None = None
    """None: the setting's."""


GROUPS = (
    Group(system="impress", temperature="cold", points=(1, 3)),
    Group(system="impress", temperature="cold", points=(4,), at_once=AT_ONCE, budget=FALLS_BACK),
    Group(system="as-h2o-lru", temperature="cold", points=(5,)),
    Group(system="as-h2o-lfu", temperature="cold", points=(5,)),
    Group(system="impress", temperature="warm", points=(1, 2, 3, 6)),
    Group(system="contiguous-kv", temperature="warm", points=(2, 6)),
    Group(system="as-h2o-lfu", temperature="warm", points=(5, 6)),
    Group(system="as-h2o-lru", temperature="warm", points=(5, 6)),
    Group(system="as-lru", temperature="warm", points=(6,)),
    Group(system="ckv", temperature="warm", points=(6,)),
)


def sides(group: Group) -> dict[int, Side]:
    """The sides of a group: 0 as it is, others by their point."""
    system = system_named(group.system)
    put_back = {2: probes_from_disk, 4: all_rows_fall_back, 5: keys_speculated}
    changed = {
        1: dataclasses.replace(system, probe_unit="kv"),
        3: dataclasses.replace(system, reorder_every=0),
    }
    return {
        point: Side(
            system=changed.get(point, system),
            open=put_back.get(point, opened),
            beside=point == 6,
        )
        for point in (0, *group.points)
    }


def opened(lab: Lab, system: SystemConfig, memory: Memory) -> Engine:
    """An engine as it is."""
    return lab.engine(system, memory=memory)


def memory_of(lab: Lab, side: Side, temperature: str) -> Memory:
    """Sizes of an engine; none where nothing is cached, but what packs need on their way."""
    if temperature == "cold":
        return {}
    if not side.beside:
        return equal_memory(lab, side.system)
    total = lab.kv_bytes * lab.setting.prefixes
    return {
        "device_cache_bytes": int(DEVICE_SHARE * total),
        "host_cache_bytes": int(HOST_SHARE * total),
    }
