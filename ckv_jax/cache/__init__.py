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
from ckv_jax.cache.tiers import Moves, PoolExhausted, Tiers, TierStats
from ckv_jax.memory.host import HostPool, slots_for

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
