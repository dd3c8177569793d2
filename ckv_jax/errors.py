"""What can go wrong above the store, in one family."""

from __future__ import annotations

from ckv_jax.storage.errors import CkvError

__all__ = ["CheckpointError", "CkvError", "ContextOverflow", "UnsupportedModel"]


class CheckpointError(CkvError):
    """A checkpoint folder that is missing something, or holds something it should not."""


class UnsupportedModel(CkvError):
    """A model configuration that this engine cannot honour; the message gives the reason."""


class ContextOverflow(CkvError):
    """Prefix and suffix together are longer than the model's context."""
