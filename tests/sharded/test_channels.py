"""What two ends of a connection find out about each other, without any device."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import Any

import pytest
from sharded.checkpoint import free_address

from ckv_jax.errors import CkvError, ProcessLost
from ckv_jax.processes.channel import Channel, accept, connect, listen
from ckv_jax.processes.following import Following
from ckv_jax.processes.leading import Leading

SECONDS = 20.0


def both_ends() -> tuple[Channel, Channel]:
    """Of one connection."""
    address, until = free_address(), time.monotonic() + SECONDS
    with listen(address) as listening:
        one = connect(address, until)
        return one, accept(listening, until)


@pytest.mark.parametrize("line", [b"no JSON\n", b"\xff\n", b'{"half": '])
def test_what_nobody_understands_loses_the_other_end(line: bytes) -> None:
    here, there = both_ends()
    lost: SimpleQueue[OSError] = SimpleQueue()
    here.watch(lambda message: None, lost.put)
    there._socket.sendall(line)
    if not line.endswith(b"\n"):
        there.close()
    assert isinstance(lost.get(timeout=SECONDS), ConnectionError)
    for end in (here, there):
        end.close()


def test_who_cannot_take_a_message_loses_the_other_end() -> None:
    here, there = both_ends()
    lost: SimpleQueue[OSError] = SimpleQueue()

    def take(message: dict[str, Any]) -> None:
        raise KeyError("value")

    here.watch(take, lost.put)
    there.send({"some": "thing"})
    assert "KeyError" in str(lost.get(timeout=SECONDS))
    for end in (here, there):
        end.close()


def test_a_fault_of_the_leader_alone_lets_all_go() -> None:
    here, there = both_ends()
    leading, following = Leading([here]), Following(there, 2)
    told: SimpleQueue[CkvError] = SimpleQueue()
    leading.on_lost(told.put)
    with (
        pytest.raises(ProcessLost, match="process 0 of 2 failed: MemoryError") as raised,
        leading.together(),
    ):
        raise MemoryError("no room")
    assert isinstance(raised.value.__cause__, MemoryError)
    assert told.get(timeout=SECONDS) is raised.value
    with pytest.raises(ProcessLost, match="the leader is gone"):
        next(following.commands())
    with pytest.raises(ProcessLost, match="process 0 of 2 failed"):
        leading.tell("step")
    following.leave()
    leading.leave()


def test_a_fault_of_a_follower_alone_ends_it() -> None:
    here, there = both_ends()
    leading, following = Leading([here]), Following(there, 2)
    with (
        pytest.raises(ProcessLost, match="this process failed: MemoryError"),
        following.together(),
    ):
        raise MemoryError("no room")
    following.leave()
    with pytest.raises(ProcessLost, match="process 1 of 2 is gone"):
        leading.least(1)
    with pytest.raises(ProcessLost, match="the leader is gone"):
        following.least(1)  # nobody takes it any more
    leading.leave()
