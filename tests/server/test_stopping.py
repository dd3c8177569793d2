"""Stopping while turns wait to be written: what is given up, and what ends well."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from server.applications import TEXT, chat
from server.serving import MODEL, in_thread, post, wait_for

from ckv_jax import Engine
from ckv_jax.server.app import create_app
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.service import Service
from ckv_jax.server.write_behind import WriteBehind


@pytest.fixture
def slow(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A disk that takes as long for a write as a test says."""
    disk = SimpleNamespace(writing=threading.Event(), going_on=threading.Event())
    append = fresh.append

    def slowly(generation: object) -> object:
        disk.writing.set()
        disk.going_on.wait(60)
        return append(generation)

    monkeypatch.setattr(fresh, "append", slowly)
    yield disk
    disk.going_on.set()


def busy(engine: Engine, slow: SimpleNamespace, drain_s: float) -> Service:
    """A server of which one turn is being written, and two more wait."""
    config = ServerConfig(
        model=MODEL, store_tokens=128, turn_tokens=16, guard_disk=False, drain_s=drain_s
    )
    app = create_app(engine, config)
    with in_thread(app) as url:
        for word in ("up", "down", "round"):
            assert post(url, "chat/completions", chat(f"{word}: {TEXT}")).status_code == 200
    assert slow.writing.wait(60)
    return app.state.service


def test_what_waits_is_given_up_and_what_is_written_ends(
    fresh: Engine, slow: SimpleNamespace
) -> None:
    service = busy(fresh, slow, drain_s=60)
    closing = threading.Thread(target=service.close)
    closing.start()
    wait_for(lambda: not service.write_behind.flush(0))
    slow.going_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert service.write_behind.stored_turns == 1


def test_a_write_that_takes_too_long_is_not_waited_for_twice(
    fresh: Engine, slow: SimpleNamespace
) -> None:
    service = busy(fresh, slow, drain_s=0.3)
    asyncio.run(service.drain())
    service.close()  # there is nothing left of the time
    assert service.write_behind.stored_turns == 0


def test_a_second_signal_ends_the_wait(fresh: Engine, slow: SimpleNamespace) -> None:
    service = busy(fresh, slow, drain_s=3600)

    async def stop() -> None:
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        service.give_up()
        await asyncio.wait_for(draining, 60)

    asyncio.run(stop())
    service.close()
    assert service.write_behind.stored_turns == 0


def test_all_is_written_where_there_is_time(fresh: Engine, slow: SimpleNamespace) -> None:
    service = busy(fresh, slow, drain_s=60)
    slow.going_on.set()
    asyncio.run(service.drain())
    service.close()
    assert service.write_behind.stored_turns == 3


def test_nobody_waits_for_what_is_dropped(engine: Engine) -> None:
    behind = WriteBehind(engine, ServerConfig(model=MODEL), share=1)
    writing, going_on, dropped = threading.Event(), threading.Event(), Mock()
    first = behind._put(lambda: (writing.set(), going_on.wait(60)))
    assert writing.wait(60)
    second = behind._put(dropped)
    behind.give_up()
    late = behind._put(dropped)
    ended = [future.done() for future in (first, second, late)]
    going_on.set()
    behind.close(60)
    assert ended == [False, True, True]
    assert first.done() and not dropped.called and not behind.flush(0)
