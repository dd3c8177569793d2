"""ckv_jax: re-prefill over prefixes whose KV cache lives on SSD."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckv_jax.config import EngineConfig, SystemConfig
    from ckv_jax.engine import Engine
    from ckv_jax.errors import CheckpointError, CkvError, ContextOverflow, UnsupportedModel
    from ckv_jax.request import Request, Result

_HOME = {
    "CheckpointError": "errors",
    "CkvError": "errors",
    "ContextOverflow": "errors",
    "Engine": "engine",
    "EngineConfig": "config",
    "Request": "request",
    "Result": "request",
    "SystemConfig": "config",
    "UnsupportedModel": "errors",
}

__all__ = [
    "CheckpointError",
    "CkvError",
    "ContextOverflow",
    "Engine",
    "EngineConfig",
    "Request",
    "Result",
    "SystemConfig",
    "UnsupportedModel",
]


def __getattr__(name: str) -> object:
    """Loads on first use, so that the store and its tools never import jax."""
    if name not in _HOME:
        raise AttributeError(f"module 'ckv_jax' has no attribute {name!r}")
    return getattr(import_module(f"ckv_jax.{_HOME[name]}"), name)
