"""What keeps processes from becoming one engine is said before JAX knows of them."""

from __future__ import annotations

import dataclasses
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sharded.checkpoint import MODEL, checkpoint, config, free_address

from ckv_jax import Engine, EngineConfig
from ckv_jax.model.shardings import Shardings
from ckv_jax.model.weights import random_model, save_orbax
from ckv_jax.processes.channel import address_of, connect
from ckv_jax.processes.join import _facts, follow, lead
from ckv_jax.storage import ChunkStore

TOLD = config("ckv", 4, processes=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("joining") / "model")


def both(
    model: Path, store: Path, *, theirs: EngineConfig = TOLD, their_store: Path | None = None
) -> list[str]:
    """What a leader and a follower say that do not fit each other."""
    address = free_address()
    place: dict[str, Any] = {"folder": model, "address": address, "wait_s": 20}
    with ThreadPoolExecutor(2) as pool:
        led = pool.submit(lead, store=store, config=TOLD, **place)
        followed = pool.submit(
            follow, store=their_store or store, config=theirs, process=1, **place
        )
        errors = [work.exception(timeout=30) for work in (led, followed)]
    assert all(isinstance(error, ValueError) for error in errors), errors
    return [str(error) for error in errors]


def test_processes_of_other_settings(model: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(TOLD, prefill_block=256)
    for said in both(model, tmp_path / "store", theirs=other):
        assert "config.prefill_block=256 in process 1, expected 128, the leader's" in said
    assert not (tmp_path / "store").exists()


def test_processes_of_other_stores(model: Path, tmp_path: Path) -> None:
    ChunkStore.open(tmp_path / "other").close()
    leader, follower = both(model, tmp_path / "store", their_store=tmp_path / "other")
    assert leader.startswith("process 1: got store") and "other" in leader
    assert "expected the leader's" in follower


@pytest.mark.parametrize("fact", ["ckv-jax", "jax"])
def test_processes_of_other_versions(model: Path, tmp_path: Path, fact: str) -> None:
    address = free_address()
    place: dict[str, Any] = {"folder": model, "store": tmp_path / "store", "address": address}
    with ThreadPoolExecutor(1) as pool:
        led = pool.submit(lead, config=TOLD, wait_s=20, **place)
        channel = connect(address, time.monotonic() + 20)
        channel.send({"process": 1, "facts": {"ckv-jax": _version(), fact: "0.0.1"}})
        refusal = channel.receive()["refused"]
        assert str(led.exception(timeout=30)) == refusal
        channel.close()
    assert f"got {fact}='0.0.1' in process 1" in refusal
    assert not (tmp_path / "store").exists()


def _version() -> str:
    from importlib.metadata import version

    return version("ckv-jax")


def test_nobody_comes(model: Path, tmp_path: Path) -> None:
    place: dict[str, Any] = {"folder": model, "store": tmp_path / "store", "config": TOLD}
    with pytest.raises(TimeoutError, match="1 of 2 processes came"):
        lead(address=free_address(), wait_s=0.2, **place)
    with pytest.raises(TimeoutError, match="nobody leads at"):
        follow(address=free_address(), process=1, wait_s=0.2, **place)
    assert not (tmp_path / "store").exists()


def test_somebody_else_connects(model: Path, tmp_path: Path) -> None:
    address = free_address()
    place: dict[str, Any] = {"folder": model, "store": tmp_path / "store", "address": address}
    other = dataclasses.replace(TOLD, prefill_block=256)
    with ThreadPoolExecutor(2) as pool:
        led = pool.submit(lead, config=TOLD, wait_s=20, **place)
        connect(address, time.monotonic() + 20).close()
        host, port = address_of(address)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"process": 1}\n', b"\xff\n"):
            with socket.create_connection((host, port + 1)) as stray:
                stray.sendall(said)
                assert stray.recv(1) == b""  # let go
        followed = pool.submit(follow, config=other, process=1, wait_s=20, **place)
        for work in (led, followed):  # who comes then is heard
            assert "config.prefill_block=256 in process 1" in str(work.exception(timeout=30))


@pytest.mark.parametrize(
    ("numbers", "says"), [((1, 1), "got process 1 twice"), ((4,), "got process 4, expected 1 to 3")]
)
def test_processes_whose_numbers_do_not_suit(
    model: Path, tmp_path: Path, numbers: tuple[int, ...], says: str
) -> None:
    address, told = free_address(), dataclasses.replace(TOLD, processes=4)
    place: dict[str, Any] = {"folder": model, "store": tmp_path / "store", "address": address}
    with ThreadPoolExecutor(1) as pool:
        led = pool.submit(lead, config=told, wait_s=20, **place)
        channels = [connect(address, time.monotonic() + 20) for _ in numbers]
        for number, channel in zip(numbers, channels, strict=True):
            channel.send({"process": number, "facts": _facts(model, told)})
        assert channels[-1].receive()["refused"].startswith(says)
        for channel in channels:
            channel.close()
        assert str(led.exception(timeout=30)).startswith(says)


def test_who_waits_for_others_to_come_may_wait_long(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckv_jax.processes.channel.SILENT_S", 0.05)
    told = dataclasses.replace(TOLD, processes=4)
    place: dict[str, Any] = {"folder": model, "store": tmp_path / "s", "address": free_address()}
    with ThreadPoolExecutor(2) as pool:
        led = pool.submit(lead, config=told, wait_s=0.5, **place)
        followed = pool.submit(follow, config=told, process=1, wait_s=20, **place)
        assert "2 of 4 processes came in 0.5 s" in str(led.exception(timeout=30))
        assert "2 of 4 processes came" in str(followed.exception(timeout=30))


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"tensor_parallel": 8}, "expected a divisor of the model's 4 KV heads"),
        ({"processes": 1}, "got processes=1, expected 2 or more"),
        ({"system": "impress"}, "which chooses tokens or everything layer by layer"),
    ],
)
def test_what_processes_cannot_do(
    model: Path, tmp_path: Path, told: dict[str, Any], says: str
) -> None:
    place: dict[str, Any] = {"folder": model, "store": tmp_path / "store", "process": 1}
    with pytest.raises(ValueError, match=says):
        follow(address="127.0.0.1:9", config=dataclasses.replace(TOLD, **told), **place)


def test_an_orbax_checkpoint_is_refused_over_several_processes(tmp_path: Path) -> None:
    save_orbax(random_model(MODEL, dtype="float32"), tmp_path / "model")
    place: dict[str, Any] = {"folder": tmp_path / "model", "store": tmp_path / "s", "config": TOLD}
    with pytest.raises(ValueError, match=r"Orbax checkpoint .*, expected Hugging Face's files"):
        lead(address="127.0.0.1:9", **place)
    with pytest.raises(ValueError, match=r"Orbax checkpoint .*, expected Hugging Face's files"):
        follow(address="127.0.0.1:9", process=1, **place)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":7700", "host:65535"])
def test_addresses_that_are_none(model: Path, tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        lead(model, store=tmp_path / "store", address=address, config=TOLD)


def test_numbers_that_do_not_go_together(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected as many devices in each"):
        EngineConfig(processes=3, tensor_parallel=4)
    with pytest.raises(ValueError, match="expected 1 to 1"):
        follow(model, store=tmp_path, address="127.0.0.1:9", process=2, config=TOLD)
    with pytest.raises(ValueError, match="expected 4 devices in each: process 0 has 1"):
        Shardings.over(MODEL, 8, 2)
    with pytest.raises(ValueError, match="processes"):
        Engine.from_pretrained(model, store=tmp_path / "store", config=TOLD)
    assert not (tmp_path / "store").exists()


def test_a_port_that_is_taken(model: Path, tmp_path: Path) -> None:
    address = free_address()
    port = int(address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(OSError):
        lead(model, store=tmp_path / "store", address=address, config=TOLD)
