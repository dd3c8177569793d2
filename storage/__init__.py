"""ckv_jax.storage: KV of shared prefixes on disk, in chunks. numpy and tensorstore, never jax."""

from ckv_jax.storage.chunk_store import ChunkStore
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.digest import DigestData
from ckv_jax.storage.errors import (
    CkvError,
    FingerprintMismatch,
    PrefixNotFound,
    ReadTimeout,
    SegmentDamaged,
    StoreClosed,
    StoreError,
    StoreFull,
)
from ckv_jax.storage.fingerprint import Fingerprint, hash_files
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.reader import PrefixReader
from ckv_jax.storage.writer import SegmentWriter

__all__ = [
    "ChunkStore",
    "CkvError",
    "DigestData",
    "Fingerprint",
    "FingerprintMismatch",
    "Layout",
    "Prefix",
    "PrefixNotFound",
    "PrefixReader",
    "ReadTimeout",
    "SegmentDamaged",
    "SegmentWriter",
    "Span",
    "StoreClosed",
    "StoreConfig",
    "StoreError",
    "StoreFull",
    "hash_files",
]
