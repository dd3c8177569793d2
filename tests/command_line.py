"""The command line, run in the test's own process or in one of its own, and what it is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckv_jax.cli import main

Here = Callable[..., tuple[int, str, str]]

TEXT = "\n".join(f"The lamp of room {n} is number {n * 37 % 101}." for n in range(30))
QUESTION = "What is the lamp of room 7?"


def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """A call that runs `ckv` with its arguments: exit code, stdout and stderr."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["ckv", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            main()
        code = exit_.value.code
        return code if isinstance(code, int) else int(code is not None), *capsys.readouterr()

    return run


def ckv(*args: object, cache: Path, code: int = 0) -> subprocess.CompletedProcess:
    """One run of the command line; fails unless it exits with `code` and shows no traceback."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(cache),
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }
    done = subprocess.run(
        [sys.executable, "-m", "ckv_jax.cli", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, (done.args, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    if code == 1:
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert done.stderr.startswith("ckv: ")
    return done
