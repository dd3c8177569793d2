"""ckv_jax: re-prefill over prefixes whose KV cache lives on SSD."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from ckv_jax.model.sampling import SamplingParams
    from ckv_jax.request import Generation, Request, Result, TokenEvent
    from ckv_jax.serving.sequence import Sequence
    from ckv_jax.stats import EngineStats

_HOME = {
    "Cancelled": "errors",
    "CheckpointError": "errors",
    "CkvError": "errors",
    "ContextOverflow": "errors",
    "DeadlineExceeded": "errors",
    "Engine": "engine",
    "EngineClosed": "errors",
    "EngineConfig": "config",
    "EngineStats": "stats",
    "Generation": "request",
    "Request": "request",
    "Result": "request",
    "SamplingParams": "model.sampling",
    "Sequence": "serving.sequence",
    "SystemConfig": "config",
    "TokenEvent": "request",
    "UnsupportedModel": "errors",
}

__all__ = [
    "Cancelled",
    "CheckpointError",
    "CkvError",
    "ContextOverflow",
    "DeadlineExceeded",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Generation",
    "Request",
    "Result",
    "SamplingParams",
    "Sequence",
    "SystemConfig",
    "TokenEvent",
    "UnsupportedModel",
]


def __getattr__(name: str) -> object:
    """Loads on first use, so that the store and its tools never import jax."""
    if name not in _HOME:
        raise AttributeError(f"module 'ckv_jax' has no attribute {name!r}")
    return getattr(import_module(f"ckv_jax.{_HOME[name]}"), name)
