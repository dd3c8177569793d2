"""The command line run in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from ckv_jax.cli import main

Here = Callable[..., tuple[int, str, str]]


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
