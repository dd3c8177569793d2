"""Whose KV this is: the identity of model, tokenizer and numerics, and content hashes of files."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckv_jax.storage.errors import FingerprintMismatch


@dataclass(frozen=True)
class Fingerprint:
    """Everything that KV depends on besides the tokens, as named strings.

    Attributes:
      fields: name → value: weights, config, tokenizer, rope, dtype, layout_version and so on.
    """

    fields: Mapping[str, str]

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping):
            raise ValueError(f"fields: got {self.fields!r}, expected names and values")
        for name, value in self.fields.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ValueError(f"fields: got {name!r}: {value!r}, expected strings")
        object.__setattr__(self, "fields", MappingProxyType(dict(sorted(self.fields.items()))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.hex)

    @cached_property
    def hex(self) -> str:
        """SHA-256 of the fields."""
        return hashlib.sha256(json.dumps(dict(self.fields)).encode()).hexdigest()

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields that differ, sorted."""
        names = sorted(self.fields.keys() | other.fields.keys())
        return [n for n in names if self.fields.get(n) != other.fields.get(n)]

    def require(self, asked: Fingerprint) -> None:
        """Raise `FingerprintMismatch` unless `asked` is this fingerprint."""
        if self != asked:
            raise FingerprintMismatch(self.fields, asked.fields)


def hash_files(paths: Iterable[str | os.PathLike[str]], cache: Path | None = None) -> str:
    """SHA-256 over the names and contents of `paths`, in the order of their names.

    With `cache`, a JSON file, a content hash is reused while path, size and mtime stay the same; a
    cache that cannot be read or written costs time, never an error.
    """
    known = _read_cache(cache)
    total = hashlib.sha256()
    changed = False
    for path in sorted((Path(p).resolve() for p in paths), key=lambda p: p.name):
        stat = path.stat()
        key = f"{path}|{stat.st_size}|{stat.st_mtime_ns}"
        digest = known.get(key)
        if digest is None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            stale = [k for k in known if k.startswith(f"{path}|")]
            for k in stale:
                del known[k]
            known[key] = digest
            changed = True
        total.update(f"{path.name}\0{digest}\0".encode())
    if cache is not None and changed:
        _write_cache(cache, known)
    return total.hexdigest()


def _read_cache(cache: Path | None) -> dict[str, str]:
    if cache is None:
        return {}
    try:
        value: Any = json.loads(cache.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {k: v for k, v in value.items() if isinstance(v, str) and len(v) == 64}


def _write_cache(cache: Path, known: Mapping[str, str]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=cache.parent, prefix=f".{cache.name}.")
        with os.fdopen(fd, "w") as file:
            json.dump(dict(known), file)
        os.replace(name, cache)
    except OSError:
        return
