"""What stays in memory: policies, and the two tiers' bookkeeping."""

from ckv_jax.cache.moves import Moves, TierStats
from ckv_jax.cache.policy import POLICIES, Policy
from ckv_jax.cache.tiers import PoolExhausted, Tiers

__all__ = [
    "POLICIES",
    "Moves",
    "Policy",
    "PoolExhausted",
    "TierStats",
    "Tiers",
]
