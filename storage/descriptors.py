"""Descriptors: letting one go never fails."""

from __future__ import annotations

import contextlib
import os


def let_go(fd: int) -> None:
    """Closes a descriptor, whatever the kernel says of it.

    Linux frees it even where `close` fails, and what this store writes is fsynced before it is
    closed: such an error proves nothing and loses nothing, and must not end an operation that is
    complete, or keep other descriptors open.
    """
    with contextlib.suppress(OSError):
        os.close(fd)
