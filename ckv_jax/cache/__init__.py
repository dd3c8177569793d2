"""What stays in memory: policies, the two tiers' bookkeeping, and the host pool."""

from ckv_jax.cache.moves import Moves, TierStats
from ckv_jax.cache.policy import POLICIES, Policy
from ckv_jax.cache.tiers import PoolExhausted, Tiers
from ckv_jax.memory.host import HostPool, slots_for

__all__ = [
    "POLICIES",
    "HostPool",
    "Moves",
    "Policy",
    "PoolExhausted",
    "TierStats",
    "Tiers",
    "slots_for",
]
