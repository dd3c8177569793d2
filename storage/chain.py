"""Names of prefixes: SHA-256 chained over chunks of tokens, seeded by whose KV it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import numpy as np

from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout

BYTES = 16
"""Bytes of a link: enough to never meet by chance, and tokens are compared on every hit anyway."""


EXACT = "exact"
"""The provenance of KV that the model computed with all of the text before it in attention."""

_PROVENANCE = re.compile(r"[a-z0-9.:_-]{1,64}")


def seed(fingerprint: Fingerprint, layout: Layout, salt: str) -> bytes:
    """The link before the first chunk: other models, layouts and tenants never meet."""
    text = f"ckv-chain\0{fingerprint.hex}\0{layout.hex}\0{salt}"
    return hashlib.sha256(text.encode()).digest()[:BYTES]


def branch(at: bytes, provenance: str) -> bytes:
    """The link before the first chunk whose KV is of another provenance than "exact".

    What follows it meets no exact KV, and nothing of a third provenance.
    """
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
    """What stands for the salt of a tenant's prefix where it is not known: equal to no salt."""
    return f"\0{tenant}" if tenant else ""
