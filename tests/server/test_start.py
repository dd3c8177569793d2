"""What keeps a server from starting is one line on stderr, and exit code 1."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Here


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """`ckv serve` runs in this process: its log must not go to a stream that is closed after."""
    loggers = [logging.getLogger(name) for name in ("ckv_jax", "uvicorn")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def start(here: Here, *args: object) -> str:
    """The line that `ckv serve` ends with."""
    code, out, err = here("serve", *args)
    assert (code, out) == (1, "")
    (line,) = err.strip().splitlines()
    assert line.startswith("ckv: ")
    return line


def test_a_port_in_use(checkpoint: Path, tmp_path: Path, here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = start(here, checkpoint, "--store", tmp_path / "kv", "--port", port)
    assert f"port {port} on 127.0.0.1 is in use" in told
    assert not (tmp_path / "kv").exists()


def test_files_that_are_not_what_they_should_be(
    checkpoint: Path, tmp_path: Path, here: Here
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["short"]')
    usual = ("--store", tmp_path / "kv", "--port", 0)
    told = start(here, checkpoint, *usual, "--api-keys", keys)
    assert "[alice]: keys: expected strings of at least 8 characters" in told
    told = start(here, checkpoint, *usual, "--api-keys", tmp_path / "none.toml")
    assert "none.toml: no such file" in told
    told = start(here, tmp_path / "none", *usual)
    assert str(tmp_path / "none") in told
    (tmp_path / "file").write_text("not a store")
    told = start(here, checkpoint, "--store", tmp_path / "file", "--port", 0)
    assert str(tmp_path / "file") in told
    told = start(here, checkpoint, *usual, "--host", "no.such.host.invalid")
    assert "expected an address of this machine" in told
    told = start(here, checkpoint, *usual, "--budget", 0)
    assert "budget" in told
    told = start(here, checkpoint, *usual, "--tensor-parallel", 1000)
    assert "got tensor_parallel=1000, expected 1 to" in told
    told = start(here, checkpoint, *usual, "--system", "as-lru")
    assert "first tokens only" in told
    usual = ("--store", tmp_path / "none", "--port", 0)
    told = start(here, checkpoint, *usual, "--codec", "int7")
    assert "got codec='int7', expected one of none, int8" in told
    assert not (tmp_path / "none").exists()
