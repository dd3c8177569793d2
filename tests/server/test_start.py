"""What keeps a server from starting is one line on stderr, and exit code 1."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from ckv_jax.cli import main


def start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object
) -> str:
    """The line that `ckv serve` ends with."""
    monkeypatch.setattr(sys, "argv", ["ckv", "serve", *map(str, args)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.strip().splitlines()
    assert line.startswith("ckv: ")
    return line


def test_a_port_in_use(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told = start(monkeypatch, capsys, checkpoint, "--store", tmp_path / "kv", "--port", port)
    assert f"port {port} on 127.0.0.1 is in use" in told
    assert not (tmp_path / "kv").exists()


def test_files_that_are_not_what_they_should_be(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["short"]')
    usual = ("--store", tmp_path / "kv", "--port", 0)
    told = start(monkeypatch, capsys, checkpoint, *usual, "--api-keys", keys)
    assert "[alice]: keys: expected texts of at least 8 characters" in told
    told = start(monkeypatch, capsys, checkpoint, *usual, "--api-keys", tmp_path / "none.toml")
    assert "none.toml: no such file" in told
    told = start(monkeypatch, capsys, tmp_path / "none", *usual)
    assert str(tmp_path / "none") in told
    (tmp_path / "file").write_text("not a store")
    told = start(monkeypatch, capsys, checkpoint, "--store", tmp_path / "file", "--port", 0)
    assert str(tmp_path / "file") in told
    told = start(monkeypatch, capsys, checkpoint, *usual, "--host", "no.such.host.invalid")
    assert "no address to serve at" in told
    told = start(monkeypatch, capsys, checkpoint, *usual, "--budget", 0)
    assert "budget" in told
    told = start(monkeypatch, capsys, checkpoint, *usual, "--system", "as-lru")
    assert "first tokens only" in told
