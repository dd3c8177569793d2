"""What ended texts leave is tried again, soon at first, and for as long as it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckv_jax.serving.offload import SegmentRemover, remove_line
from ckv_jax.storage.errors import StoreUnavailable

SECONDS = 20.0


class Store:
    """Removes what it is asked to, except what somebody reads, or while it gives no answer."""

    def __init__(self, *read: str) -> None:
        self.read = set(read)
        self.error: StoreUnavailable | None = None
        self.asked: list[str] = []

    def remove_segment(self, segment: str) -> bool:
        self.asked.append(segment)
        if self.error is not None:
            raise self.error
        return segment not in self.read


class Waits(threading.Condition):
    """Writes down for how long the thread would wait, which then does not for the first few."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.seconds: list[float | None] = []
        self.most = most
        self.enough = threading.Event()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self.seconds.append(timeout)
        if len(self.seconds) < self.most and timeout is not None:
            return predicate()
        self.enough.set()
        return super().wait_for(predicate, None)


def leftovers(store: Store, most: int = 1) -> tuple[SegmentRemover, Waits]:
    left, waits = SegmentRemover(store), Waits(most)  # type: ignore[arg-type]
    left._changed = waits
    return left, waits


def test_a_line_ends_at_what_somebody_reads() -> None:
    store: Any = Store("b")
    assert not remove_line(store, ["a", "b", "c"])
    assert store.asked == ["a", "b"] and remove_line(store, ["a", "c"]) and remove_line(store, [])


def test_what_is_read_is_tried_later_and_later() -> None:
    store = Store("a")
    left, waits = leftovers(store, 9)
    left.add(["a"])
    assert waits.enough.wait(SECONDS)
    assert waits.seconds == [0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0, 2.0, 2.0]
    assert store.asked == ["a"] * 9
    left.close()
    assert store.asked == ["a"] * 10  # a last time


def test_once_something_could_be_removed_the_rest_is_tried_soon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store("a")
    left, waits = leftovers(store, 3)
    left.add(["a"])
    assert waits.enough.wait(SECONDS)
    waits.enough.clear()
    left.add(["b"])
    assert waits.enough.wait(SECONDS)
    assert waits.seconds == [0.04, 0.08, 0.16, 0.02] and left._left == [["a"]]
    store.read.clear()
    waits.enough.clear()
    left.add(["c"])
    assert waits.enough.wait(SECONDS)
    assert waits.seconds[4:] == [None] and not left._left  # until there is something again
    left.close()
    left.close()
    assert not caplog.records


def test_what_stays_in_the_end_is_said_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    left, waits = leftovers(store := Store())
    left.add([])
    assert left._thread is None
    left.close()
    store.error = StoreUnavailable("locked")
    left, waits = leftovers(store)
    left.add(["a"])
    assert waits.enough.wait(SECONDS)
    assert left._thread is not None and left._thread.daemon
    left.close()
    assert caplog.messages == ["segments of ended generations stay in the store: locked"]
