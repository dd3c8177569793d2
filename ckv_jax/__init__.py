"""ckv_jax: re-prefill over prefixes whose KV cache lives on SSD."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckv_jax.answer import Answer as Answer
    from ckv_jax.config import EngineConfig as EngineConfig
    from ckv_jax.config import SystemConfig as SystemConfig
    from ckv_jax.engine import Engine as Engine
    from ckv_jax.errors import Cancelled as Cancelled
    from ckv_jax.errors import CheckpointError as CheckpointError
    from ckv_jax.errors import CkvError as CkvError
    from ckv_jax.errors import ContextOverflow as ContextOverflow
    from ckv_jax.errors import DeadlineExceeded as DeadlineExceeded
    from ckv_jax.errors import EngineClosed as EngineClosed
    from ckv_jax.errors import UnsupportedModel as UnsupportedModel
    from ckv_jax.model.sampling import Logprobs as Logprobs
    from ckv_jax.model.sampling import SamplingParams as SamplingParams
    from ckv_jax.request import Blend as Blend
    from ckv_jax.request import Completion as Completion
    from ckv_jax.request import Generation as Generation
    from ckv_jax.request import Request as Request
    from ckv_jax.request import Result as Result
    from ckv_jax.request import TokenEvent as TokenEvent
    from ckv_jax.serving.sequence import Sequence as Sequence
    from ckv_jax.serving.streams import AsyncTokenStream as AsyncTokenStream
    from ckv_jax.serving.streams import TokenStream as TokenStream
    from ckv_jax.storage.chain import Fingerprint as Fingerprint
    from ckv_jax.storage.config import StoreConfig as StoreConfig
    from ckv_jax.storage.errors import FingerprintMismatch as FingerprintMismatch
    from ckv_jax.storage.errors import PrefixNotFound as PrefixNotFound
    from ckv_jax.storage.errors import StoreError as StoreError
    from ckv_jax.storage.errors import StoreFull as StoreFull
    from ckv_jax.storage.errors import StoreUnavailable as StoreUnavailable
    from ckv_jax.storage.prefix import Prefix as Prefix
    from ckv_jax.storage.store import ChunkStore as ChunkStore
    from ckv_jax.trace import EngineStats as EngineStats
    from ckv_jax.trace import Trace as Trace

if find_spec("ckv_jax.storage") is None:  # Python found the folder of a clone
    raise ImportError("this clone of ckv_jax is not installed; run in it: pip install -e .")

_NAMES = {
    "answer": "Answer",
    "config": "EngineConfig SystemConfig",
    "engine": "Engine",
    "errors": "Cancelled CheckpointError CkvError ContextOverflow DeadlineExceeded EngineClosed "
    "UnsupportedModel",
    "model.sampling": "Logprobs SamplingParams",
    "request": "Blend Completion Generation Request Result TokenEvent",
    "serving.sequence": "Sequence",
    "serving.streams": "AsyncTokenStream TokenStream",
    "storage.chain": "Fingerprint",
    "storage.config": "StoreConfig",
    "storage.errors": "FingerprintMismatch PrefixNotFound StoreError StoreFull StoreUnavailable",
    "storage.prefix": "Prefix",
    "storage.store": "ChunkStore",
    "trace": "EngineStats Trace",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Loads on first use, so that the store and its tools never import jax."""
    if name not in _HOME:
        raise AttributeError(f"module 'ckv_jax' has no attribute {name!r}")
    return getattr(import_module(f"ckv_jax.{_HOME[name]}"), name)
