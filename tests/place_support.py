"""Segments' names, and what tests of a store's place ask of the process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckv_jax.storage.place.disk import write_file
from ckv_jax.storage.place.local import LocalWorkspace
from ckv_jax.storage.segment import manifest as manifests

ID, OTHER = "ab" * 16, "cd" * 16
"""Names of two segments."""


def open_files(folder: Path) -> int:
    """How many files in a folder, and itself, this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += Path(os.readlink(f"/proc/self/fd/{name}")).is_relative_to(folder)
    return found


def never() -> bool:
    """For what must not ask whether a segment is good."""
    raise AssertionError("nothing is there")


def filled(root: Path, text: str) -> LocalWorkspace:
    """A workspace with a manifest of this text."""
    made = LocalWorkspace(root)
    write_file(made.path / manifests.FILE, text.encode())
    return made
