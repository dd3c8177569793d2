"""Compilers for TPUs and GPUs that this machine lacks, in a folder beside JAX's own packages.

    python -m bench.aot.compilers [tpu] [gpu]    # installs them (1.1 GB) unless they are there

They go into the user's cache folder, by versions of JAX and Python, so that a new environment or a
clean clone finds them again. They are used by naming that folder in PYTHONPATH of one process.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PathDistribution, requires, version
from pathlib import Path
from typing import Literal

from bench.common import command
from ckv_jax.user_cache import cache_folder

Kind = Literal["tpu", "gpu"]
KINDS: tuple[Kind, ...] = ("tpu", "gpu")
INSTALL_S = 900


def folder(kind: Kind) -> Path:
    """Where one compiler is or would be."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder() / f"compilers-jax{version('jax')}-py{python}" / kind


def requirements(kind: Kind) -> list[str]:
    """What this JAX needs of packages to compile for such devices, as pip takes it."""
    if kind == "gpu":
        return [f"jax-cuda13-plugin=={version('jax')}", f"jax-cuda13-pjrt=={version('jax')}"]
    wanted = [line.partition(";")[0].strip() for line in requires("jax") or ()]
    return [line for line in wanted if line.startswith("libtpu")]


def installed(kind: Kind) -> dict[str, str]:
    """Versions of what is there, by name."""
    return {
        dist.metadata["Name"].lower().replace("_", "-"): dist.version
        for dist in map(PathDistribution, folder(kind).glob("*.dist-info"))
    }


def trouble(kind: Kind) -> str | None:
    """Why nothing can be compiled for such devices here; None if it can."""
    there = installed(kind)
    for requirement in requirements(kind):
        name, _, wanted = requirement.partition("==")
        if name not in there:
            return f"{name} is not installed: run `make aot`"
        if not re.fullmatch(wanted.replace(".", r"\.").replace("*", ".*"), there[name]):
            return f"{name} is {there[name]}, this JAX needs {wanted}: run `make aot`"
    return None


def install(kind: Kind) -> str | None:
    """Installs a compiler unless it is there; what went wrong, in one line."""
    if trouble(kind) is None:
        return None
    place = folder(kind)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{kind}-") as fresh:
        command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check",
                   "--no-input", "--no-deps", "--no-compile", "--target", f"{fresh}/packages",
                   *requirements(kind)]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"pip took longer than {INSTALL_S} s"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return lines[-1] if lines else f"pip ended with {done.returncode}"
        if place.exists():
            shutil.rmtree(place)
        (Path(fresh) / "packages").rename(place)
    return trouble(kind)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if one of them cannot be had."""
    p = command(__doc__, prog="python -m bench.aot.compilers", result=False)
    p.add_argument("kinds", nargs="*", metavar="KIND", help="tpu or gpu (default: both)")
    kinds = p.parse_args(argv).kinds or KINDS
    unknown = sorted({*kinds} - {*KINDS})
    if unknown:
        p.error(f"got {', '.join(unknown)}, expected tpu or gpu")
    failures = {kind: install(kind) for kind in kinds}
    for kind, failure in failures.items():
        print(f"{kind}: {failure or folder(kind)}", flush=True)
    return 1 if any(failures.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
