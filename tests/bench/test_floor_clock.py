"""What the floor makes of the time that its calls take, told by a clock of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import floor
from bench.floor import Recording, compute_floor_ms


class Clock:
    """Stands still but for what calls cost."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(floor, "time", made)
    return made


def chain(clock: Clock, costs: dict[str, float]) -> Recording:
    """Two calls, the second of which takes what the first returned, each at its cost."""

    def program(name: str, body: Any) -> Any:
        jitted = jax.jit(body)

        def timed(*args: Any) -> Any:
            clock.now += costs[name]
            return jitted(*args)

        return timed

    found = Recording()
    x = jnp.arange(3.0)
    twice = found.call("double", program("double", lambda x: 2 * x), (x,), {})
    found.call("add", program("add", lambda x, y: x + y), (twice, x), {})
    return found


class Asked:
    """Stands where a lab does: the floor of a recording needs nothing else of it."""

    kv_bytes = 1000

    def __init__(self) -> None:
        self.bytes: list[int] = []

    @contextmanager
    def engine(self, system: object, *, device_bytes: int) -> Iterator[object]:
        self.bytes.append(device_bytes)
        yield object()


def test_the_floor_is_the_median_of_replays_after_one_that_warms(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the replays 9, 1, 2, 40 and 3 ms the first is not counted, whatever it took."""
    spent = {0.1: [900.0, 9.0, 1.0, 2.0, 40.0, 3.0], 0.5: [0.0, 8.0, 8.0, 5.0, 8.0, 1.0]}

    class Replays:
        def __init__(self, budget: float) -> None:
            self.left = list(spent[budget])

        def replay(self) -> None:
            clock.now += self.left.pop(0) / 1e3

    made: dict[float, Replays] = {}

    def record(lab: object, engine: object, budget: float) -> Replays:
        made[budget] = Replays(budget)
        return made[budget]

    monkeypatch.setattr(floor, "record", record)
    lab = Asked()
    found = compute_floor_ms(lab, "ckv", (0.1, 0.5), replays=5)  # type: ignore[arg-type]
    assert found == pytest.approx([3.0, 8.0])
    assert all(not replays.left for replays in made.values())
    assert lab.bytes[0] >= 2 * Asked.kv_bytes  # room for all of it, and for what is on its way
