"""What stays in memory: policies, the two tiers' bookkeeping, and the host pool."""

from ckv_jax.cache.policy import (
    POLICIES,
    AttentionGuided,
    FrequencyThenAttention,
    ImportanceRatio,
    Lfu,
    Lru,
    Policy,
)
from ckv_jax.cache.pool import HostPool, slots_for
from ckv_jax.cache.tiers import Moves, PoolExhausted, Tiers, TierStats

__all__ = [
    "POLICIES",
    "AttentionGuided",
    "FrequencyThenAttention",
    "HostPool",
    "ImportanceRatio",
    "Lfu",
    "Lru",
    "Moves",
    "Policy",
    "PoolExhausted",
    "TierStats",
    "Tiers",
    "slots_for",
]
