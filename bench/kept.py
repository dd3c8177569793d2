"""Finished parts of a run that takes long, kept on disk, so that one that was cut short goes on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench.common import Json, machine

__all__ = ["Kept", "same_code"]

_SAME = ("cpu", "cores", "memory_gib", "device", "python", "packages")


class Kept:
    """Parts by name, in a file beside the result that they become part of.

    Parts count that were made by this code (but for documents and results), on this machine, with
    these arguments; others are forgotten.
    """

    def __init__(self, result: Path | None, about: Json) -> None:
        """`result`: the file that `--json` names; None: nothing is kept. `about`: plain JSON values
        that parts depend on."""
        self._path = None if result is None else result.with_suffix(".parts.json")
        found = machine()
        self._head: Json = {"about": json.loads(json.dumps(about)), "commit": found["commit"]}
        self._head["machine"] = {name: found[name] for name in _SAME}
        self._parts: dict[str, Json] = {}
        if self._path is not None and self._path.is_file():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            same = all(kept[name] == self._head[name] for name in ("about", "machine"))
            if same and same_code(kept["commit"]):
                self._parts = kept["parts"]
                print(f"goes on after {len(self._parts)} parts that {self._path} has", flush=True)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def part(self, name: str, make: Callable[[], Json]) -> Json:
        """What is kept under a name, or what `make` gives, which is kept from then on."""
        if name not in self._parts:
            self._parts[name] = make()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                new = self._path.with_suffix(".new")
                new.write_text(json.dumps(self._head | {"parts": self._parts}), encoding="utf-8")
                new.replace(self._path)
        return self._parts[name]

    def forget(self) -> None:
        """When the result is written, its parts are in it."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def same_code(commit: str) -> bool:
    """Whether what lies here differs from that commit in documents and results alone."""
    words = ["git", "diff", "--quiet", commit, "--", ".", ":!*.md", ":!bench/results"]
    try:
        done = subprocess.run(
            words, cwd=Path(__file__).parents[1], capture_output=True, timeout=60, check=False
        )
    except OSError:
        return False
    return done.returncode == 0
