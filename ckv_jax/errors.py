"""What can go wrong above the store, in one family."""

from __future__ import annotations

from ckv_jax.storage.errors import CkvError

__all__ = [
    "Cancelled",
    "CheckpointError",
    "CkvError",
    "ContextOverflow",
    "DeadlineExceeded",
    "EngineClosed",
    "UnsupportedModel",
]


class CheckpointError(CkvError):
    """A checkpoint that is missing something, or holds something it should not."""


class UnsupportedModel(CkvError):
    """A model configuration that this engine cannot honour; the message gives the reason."""


class ContextOverflow(CkvError):
    """Prefix and suffix together are longer than the model's context."""


class Cancelled(CkvError):
    """The caller gave the request up before its answer was there."""


class DeadlineExceeded(CkvError):
    """The request's deadline passed before its first token was there."""


class EngineClosed(CkvError):
    """The engine was closed before the request's turn came."""
