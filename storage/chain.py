"""Fingerprints of models and files, and ids of prefixes.

A name is SHA-256 chained over chunks of tokens, seeded by whose KV it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from ckv_jax.storage.errors import FingerprintMismatch
from ckv_jax.storage.layout import Layout

_SAMPLES = 64  # places of a file that are read to know it again
_SAMPLE_BYTES = 64 << 10  # at each of them
_SETTLED_S = 2.0  # longer than any file system's clock takes from one tick to the next
_LARGEST_CACHE = 8 << 20
BYTES = 16
"""Bytes of a link: enough to never meet by chance, and tokens are compared on every hit anyway."""


EXACT = "exact"
"""The provenance of KV that the model computed with all of the text before it in attention."""

_PROVENANCE = re.compile(r"[a-z0-9.:_-]{1,64}")


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model for its KV: everything that KV depends on besides the tokens.

    Raises `ValueError` for fields that are not strings.

    Attributes:
      fields: name → value, both strings: weights, config, tokenizer, rope, dtype, layout_version
        and others.
    """

    fields: Mapping[str, str]

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping):
            raise ValueError(f"fields: got {self.fields!r}, expected names and values")
        for name, value in self.fields.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ValueError(f"fields: got {name!r}: {value!r}, expected strings")
        object.__setattr__(self, "fields", MappingProxyType(dict(sorted(self.fields.items()))))

    def __hash__(self) -> int:
        return hash(self.hex)

    @cached_property
    def hex(self) -> str:
        """SHA-256 of the fields, as hex digits."""
        return hashlib.sha256(json.dumps(dict(self.fields)).encode()).hexdigest()

    def require(self, asked: Fingerprint) -> None:
        """Raises `FingerprintMismatch` unless `asked` equals this fingerprint."""
        if self != asked:
            raise FingerprintMismatch(self.fields, asked.fields)


def hash_files(paths: Iterable[str | os.PathLike[str]], cache: Path | None = None) -> str:
    """SHA-256 over the names and contents of `paths`, in the order of their names.

    With `cache`, a JSON file, a content hash is reused while the file is provably the same: its
    path, device, inode, size, both times (no program can set the second, the time of the last
    change), and a sample of its bytes. A cache that cannot be read or written costs time, never an
    error.
    """
    known = _read_cache(cache)
    total = hashlib.sha256()
    changed = False
    for path in sorted((Path(p).resolve() for p in paths), key=lambda p: p.name):
        with path.open("rb") as file:
            key = "" if cache is None else _identity(path, file)
            digest = known.get(key) if key else None
            if digest is None:
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                for stale in [k for k in known if k.startswith(f"{path}|")]:
                    del known[stale]
                # A file that changed just now may change again within the same tick of the clock.
                settled = time.time() - os.fstat(file.fileno()).st_ctime > _SETTLED_S
                if key and settled:
                    known[key] = digest
                    changed = True
        total.update(f"{path.name}\0{digest}\0".encode())
    if cache is not None and changed:
        with contextlib.suppress(OSError):
            write_json(cache, known)
    return total.hexdigest()


def _identity(path: Path, file: BinaryIO) -> str:
    """Returns an identity of a file that changes whenever the file does."""
    found = os.fstat(file.fileno())
    sample = hashlib.sha256()
    for part in range(_SAMPLES):
        file.seek(max(0, found.st_size - _SAMPLE_BYTES) * part // (_SAMPLES - 1))
        sample.update(file.read(_SAMPLE_BYTES))
    times = f"{found.st_mtime_ns}|{found.st_ctime_ns}"
    where = f"{found.st_dev}|{found.st_ino}|{found.st_size}"
    return f"{path}|{where}|{times}|{sample.hexdigest()}"


def _read_cache(cache: Path | None) -> dict[str, str]:
    if cache is None:
        return {}
    try:
        with cache.open("rb") as file:
            value: Any = json.loads(file.read(_LARGEST_CACHE))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {k: v for k, v in value.items() if isinstance(v, str) and len(v) == 64}


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, whose readers meet the old contents or the new. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(fd)
        os.replace(fresh, path)
    except OSError:
        Path(fresh).unlink(missing_ok=True)
        raise


def seed(fingerprint: Fingerprint, layout: Layout, salt: str) -> bytes:
    """The link before the first chunk: other models, layouts and tenants never meet."""
    text = f"ckv-chain\0{fingerprint.hex}\0{layout.hex}\0{salt}"
    return hashlib.sha256(text.encode()).digest()[:BYTES]


def branch(at: bytes, provenance: str) -> bytes:
    """The link before the first chunk whose KV is of another provenance than "exact": what follows
    meets no exact KV, and nothing of a third provenance."""
    if provenance == EXACT:
        return at
    return hashlib.sha256(f"ckv-branch\0{provenance}\0".encode() + at).digest()[:BYTES]


def check_provenance(provenance: object) -> str:
    """`provenance`; raises ValueError unless it is a short name such as "exact"."""
    if not isinstance(provenance, str) or not _PROVENANCE.fullmatch(provenance):
        raise ValueError(f"provenance: got {provenance!r}, expected 1 to 64 of a-z 0-9 . : _ -")
    return provenance


def link(before: bytes, tokens: bytes) -> bytes:
    """The link after one chunk whose little-endian int32 `tokens` follow the link `before`."""
    return hashlib.sha256(before + tokens).digest()[:BYTES]


def links(before: bytes, tokens: np.ndarray, chunk_tokens: int) -> Iterator[bytes]:
    """One link per chunk of `tokens` [T]; the last chunk may be partial."""
    data = tokens.astype("<i4", copy=False).tobytes()
    step = 4 * chunk_tokens
    for start in range(0, len(data), step):
        before = hashlib.sha256(before + data[start : start + step]).digest()[:BYTES]
        yield before


def as_tokens(tokens: np.ndarray) -> np.ndarray:
    """`tokens` as an immutable int32 [T] array of its own; raises ValueError for anything else."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"tokens: got {array.dtype} {array.shape}, expected integers [T]")
    if array.size and (int(array.min()) < 0 or int(array.max()) > np.iinfo(np.int32).max):
        raise ValueError("tokens: got ids outside int32, expected ids in [0, 2**31)")
    result = array.astype(np.int32)
    result.flags.writeable = False
    return result


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """With how many tokens both begin; int [T] each."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


PUBLIC = ""
"""The mark of what has no salt."""

_LARGEST = 4096  # characters of a salt


def tenant_mark(salt: str) -> str:
    """32 hex digits that stand for a salt; PUBLIC for the empty one."""
    return hashlib.sha256(f"ckv-tenant\0{salt}".encode()).hexdigest()[:32] if salt else PUBLIC


def check_salt(salt: str) -> str:
    """`salt`; raises ValueError for what none can be."""
    if not isinstance(salt, str) or "\0" in salt or len(salt) > _LARGEST:
        raise ValueError(f"salt: expected text of at most {_LARGEST} characters, without NUL")
    return salt


def unknown_salt(tenant: str) -> str:
    """Returns a placeholder for the unknown salt of a tenant's prefix; it equals no salt."""
    return f"\0{tenant}" if tenant else ""
