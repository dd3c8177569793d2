"""Letting a descriptor go: nothing that the kernel says of it fails an operation."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckv_jax.storage.place.disk import let_go


def test_a_close_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    close = os.close

    def failing(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, "from the disk")

    monkeypatch.setattr(os, "close", failing)
    let_go(fd)
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
