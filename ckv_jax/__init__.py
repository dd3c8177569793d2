"""ckv_jax: re-prefill over prefixes whose KV cache lives on SSD."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckv_jax.answer import Answer
    from ckv_jax.config import EngineConfig, SystemConfig
    from ckv_jax.engine import Engine
    from ckv_jax.errors import (
        Cancelled,
        CheckpointError,
        CkvError,
        ContextOverflow,
        DeadlineExceeded,
        EngineClosed,
        UnsupportedModel,
    )
    from ckv_jax.model.sampling import Logprobs, SamplingParams
    from ckv_jax.request import Blend, Completion, Generation, Request, Result, TokenEvent
    from ckv_jax.serving.async_streams import AsyncTokenStream
    from ckv_jax.serving.sequence import Sequence
    from ckv_jax.serving.streams import TokenStream
    from ckv_jax.storage.config import StoreConfig
    from ckv_jax.storage.errors import (
        FingerprintMismatch,
        PrefixNotFound,
        StoreError,
        StoreFull,
        StoreUnavailable,
    )
    from ckv_jax.storage.fingerprint import Fingerprint
    from ckv_jax.storage.prefix import Prefix
    from ckv_jax.storage.store import ChunkStore
    from ckv_jax.trace import EngineStats, Trace

_HOME = {
    "Answer": "answer",
    "AsyncTokenStream": "serving.async_streams",
    "Blend": "request",
    "Cancelled": "errors",
    "CheckpointError": "errors",
    "ChunkStore": "storage.store",
    "CkvError": "errors",
    "Completion": "request",
    "ContextOverflow": "errors",
    "DeadlineExceeded": "errors",
    "Engine": "engine",
    "EngineClosed": "errors",
    "EngineConfig": "config",
    "EngineStats": "trace",
    "Fingerprint": "storage.fingerprint",
    "FingerprintMismatch": "storage.errors",
    "Generation": "request",
    "Logprobs": "model.sampling",
    "Prefix": "storage.prefix",
    "PrefixNotFound": "storage.errors",
    "Request": "request",
    "Result": "request",
    "SamplingParams": "model.sampling",
    "Sequence": "serving.sequence",
    "StoreConfig": "storage.config",
    "StoreError": "storage.errors",
    "StoreFull": "storage.errors",
    "StoreUnavailable": "storage.errors",
    "SystemConfig": "config",
    "TokenEvent": "request",
    "TokenStream": "serving.streams",
    "Trace": "trace",
    "UnsupportedModel": "errors",
}

__all__ = [
    "Answer",
    "AsyncTokenStream",
    "Blend",
    "Cancelled",
    "CheckpointError",
    "ChunkStore",
    "CkvError",
    "Completion",
    "ContextOverflow",
    "DeadlineExceeded",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Fingerprint",
    "FingerprintMismatch",
    "Generation",
    "Logprobs",
    "Prefix",
    "PrefixNotFound",
    "Request",
    "Result",
    "SamplingParams",
    "Sequence",
    "StoreConfig",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "SystemConfig",
    "TokenEvent",
    "TokenStream",
    "Trace",
    "UnsupportedModel",
]


def __getattr__(name: str) -> object:
    """Loads on first use, so that the store and its tools never import jax."""
    if name not in _HOME:
        raise AttributeError(f"module 'ckv_jax' has no attribute {name!r}")
    return getattr(import_module(f"ckv_jax.{_HOME[name]}"), name)
