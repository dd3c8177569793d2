"""Compilation of the native kernels, at first use or into a wheel.

The standard library alone (and setuptools, for a wheel): a build knows nothing of this package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-w")
_SECONDS = 300


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of the usual names."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def headers() -> Path | None:
    """XLA's headers for foreign functions, which jaxlib brings along."""
    found = importlib.util.find_spec("jaxlib")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "include"
    return folder if (folder / "xla" / "ffi" / "api" / "c_api.h").is_file() else None


def lacking() -> str:
    """Returns the missing requirement of a build; empty if there is none."""
    if sys.byteorder != "little":
        return f"got a {sys.byteorder}-endian processor, expected a little-endian one"
    if headers() is None:
        return "got a jaxlib without XLA's headers, expected them in its include"
    return ""


def library_name() -> str:
    """Names what the library is made of: sources, flags, the machine; then XLA's interface."""
    mine = hashlib.sha256(repr((_FLAGS, platform.system(), platform.machine())).encode())
    for source in sorted((*SOURCES.glob("*.cc"), *SOURCES.glob("*.h"))):
        mine.update(source.read_bytes())
    include = headers()
    assert include is not None
    interface = hashlib.sha256((include / "xla" / "ffi" / "api" / "c_api.h").read_bytes())
    return f"ckv-{mine.hexdigest()[:16]}-{interface.hexdigest()[:8]}.so"


def compile_library(folder: Path) -> Path:
    """Compiles into `folder`, under `library_name`; other processes may do the same meanwhile.

    Raises:
      OSError: something is `lacking`, there is no compiler, or it fails; in one line.
    """
    if refused := lacking():
        raise OSError(refused)
    command = compiler()
    if command is None:
        raise OSError("got no C++ compiler, expected $CXX, c++, g++ or clang++")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = folder / library_name()
    with tempfile.TemporaryDirectory(prefix=".ckv-", dir=folder) as work:
        made = Path(work) / wanted.name
        source = SOURCES / "kernels.cc"
        words = [command, *_FLAGS, "-isystem", str(headers()), "-o", str(made), str(source)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"{command} took more than {_SECONDS} s") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            why = errors[0] if errors else f"exit code {done.returncode}"
            raise OSError(f"{command} failed: {why[:200]}")
        made.replace(wanted)
    return wanted
