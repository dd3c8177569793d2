"""What one engine computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckv_jax.config import SystemConfig
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.plan import Plan
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.open_prefix import Source
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.prefix.packs import Packs
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.store import ChunkStore
from ckv_jax.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The model, the store and the caches of one engine. Engine thread only."""

    layers: Layers
    store: ChunkStore
    system: SystemConfig
    layout: Layout
    plan: Plan
    memory: Memory
    prefixes: OpenPrefixes
    open_packs: Callable[[Sequence[Source], Trace], Packs]
    """The packs of some prefixes, for one batch: a context manager."""

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        row = self.layout.num_kv_heads * self.layout.head_dim * self.layout.numpy_dtype.itemsize
        return 2 * row * self.layout.num_layers
