"""Finished parts of a run that takes long, kept on disk, so that one that was cut short goes on."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.common import CODE, Json, git, machine, read_json, write_text
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.weights import model_fingerprint

SAME = ("cpu", "cores", "memory_gib", "device", "native_kernels", "python", "packages")
"""What of a machine has to be the same for figures to be of one."""


class Kept:
    """Parts by name, in a file beside the result that they become part of.

    Parts count that were made by this code (but for documents and results), on this machine, with
    these arguments; others are forgotten. Of code that is not committed none are written, since
    nothing would tell which code that was; nor while files lie in the repository that git does not
    know, but for documents and results.
    """

    def __init__(self, result: Path | None, about: Json) -> None:
        """`result`: the file that `--json` names; None: nothing is kept. `about`: plain JSON values
        that parts depend on."""
        found = machine()
        self._path = None
        self.resumed = 0
        """Parts that an earlier run made."""
        if result is not None and not found.get("dirty") and same_code(found["commit"]):
            self._path = result.with_suffix(".parts.json")
        self._head: Json = {"about": json.loads(json.dumps(about)), "commit": found["commit"]}
        self._head["machine"] = {name: found[name] for name in SAME}
        self._parts: dict[str, Json] = {}
        if self._path is not None and self._path.is_file():
            kept = read_json(self._path)
            same = all(kept[name] == self._head[name] for name in ("about", "machine"))
            if same and same_code(kept["commit"]):
                self._parts = kept["parts"]
                self.resumed = len(self._parts)
                print(f"goes on after {len(self._parts)} parts that {self._path} has", flush=True)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def part(self, name: str, make: Callable[[], Json]) -> Json:
        """What is kept under a name, or what `make` gives, which is kept from then on."""
        if name not in self._parts:
            self._parts[name] = make()
            if self._path is not None:
                write_text(self._path, json.dumps(self._head | {"parts": self._parts}))
        return self._parts[name]

    def said(self) -> Json:
        """For the result: how many of its parts an earlier run made; nothing where all of it is of
        one."""
        return {"resumed": self.resumed} if self.resumed else {}

    def forget(self) -> None:
        """When the result is written, its parts are in it."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def same_code(commit: str) -> bool:
    """Whether what lies here differs from that commit in documents and results alone, files that
    git does not know (and is not told to ignore) included."""
    changed = git("diff", "--quiet", commit, "--", *CODE)
    unknown = git("ls-files", "--others", "--exclude-standard", "--", *CODE)
    return changed == unknown == ""


def disk_of(folder: Path | None) -> int:
    """The number of the device that a folder lies on; None: of temporary folders."""
    return os.stat(folder or tempfile.gettempdir()).st_dev


def checkpoint_fingerprint(folder: Path) -> str:
    """Of a checkpoint's weights and tokenizer, whatever its folder is called."""
    return model_fingerprint(folder, ModelConfig.from_hf(folder), dtype="float32").hex
