"""ckv_jax.storage: KV of shared prefixes on disk, in chunks. numpy and tensorstore, never jax."""

from ckv_jax.storage.chain import Fingerprint, hash_files
from ckv_jax.storage.codec import Codec
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.digest import DigestData
from ckv_jax.storage.errors import (
    CkvError,
    FingerprintMismatch,
    PrefixNotFound,
    ReadTimeout,
    SegmentDamaged,
    SegmentForeign,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
    WrongKey,
)
from ckv_jax.storage.index.catalog import Eviction
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix, PrefixRecord, Span
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.storage.segment.writer import SegmentWriter
from ckv_jax.storage.store import ChunkStore
from ckv_jax.storage.tools.inspect import (
    Inspection,
    PruneReport,
    inspect_store,
    pin_prefix,
    plot_importance,
    prune_store,
    update_record,
)
from ckv_jax.storage.tools.verify import VerifyReport, verify_store

__all__ = [
    "ChunkStore",
    "CkvError",
    "Codec",
    "DigestData",
    "Eviction",
    "Fingerprint",
    "FingerprintMismatch",
    "Inspection",
    "Layout",
    "Prefix",
    "PrefixNotFound",
    "PrefixReader",
    "PrefixRecord",
    "PruneReport",
    "ReadTimeout",
    "SegmentDamaged",
    "SegmentForeign",
    "SegmentWriter",
    "Span",
    "StoreClosed",
    "StoreConfig",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "VerifyReport",
    "WrongKey",
    "hash_files",
    "inspect_store",
    "pin_prefix",
    "plot_importance",
    "prune_store",
    "update_record",
    "verify_store",
]
