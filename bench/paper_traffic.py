"""Requests as the ContiguousKV paper draws them, and what its caches then hold.

Few-shot prefixes of its Table 1, drawn normally; 10 GB of GPU and 24 GB of CPU memory (§5.1).
A question finds its important tokens anew: `stable` of them are its prefix's own, alike for every
question, the others are drawn evenly. One layer stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from bench.cache_policies import request
from bench.workload import normal_choice
from ckv_jax.cache import POLICIES, Tiers
from ckv_jax.config import SystemConfig
from ckv_jax.model.config import PUBLISHED

SEED = 42
GB = 1e9
DEVICE_BYTES, HOST_BYTES = 10 * GB, 24 * GB
DEVICE_BUFFERS, HOST_BUFFERS = 0.2 * GB, 0.4 * GB
"""Of these, what is for packs on their way (§4.5)."""
LENGTHS = MappingProxyType({"SST-2": 3800, "SubJ": 4400, "TREC": 5000, "RTE": 6000})
SIZES = MappingProxyType(
    {
        "SST-2": {"7B": 67, "14B": 226, "32B": 301},
        "SubJ": {"7B": 67, "14B": 230, "32B": 305},
        "TREC": {"7B": 75, "14B": 257, "32B": 343},
        "RTE": {"7B": 68, "14B": 233, "32B": 311},
    }
)
"""GB of prefix KV (Table 1)."""
WARM_UP, MEASURED = 400, 200
"""Requests."""


def token_bytes(model: str) -> int:
    """Bytes of one token's keys and values in all layers, 16 bits each."""
    config = PUBLISHED[model]
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and one set of prefixes."""

    model: str
    tokens: int
    """Of each prefix."""
    size_gb: float
    """Of all prefixes' KV."""

    @classmethod
    def of(cls, dataset: str, model: str) -> Case:
        """A row of Table 1."""
        return cls(model=model, tokens=LENGTHS[dataset], size_gb=SIZES[dataset][model])

    @property
    def prefixes(self) -> int:
        """How many prefixes make that size."""
        return round(self.size_gb * GB / (self.tokens * token_bytes(self.model)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one request needs and where it is."""

    needed: float
    """Bytes of packs over bytes of the prefix's KV."""
    device: float
    """Share of these bytes that the device's cache has."""
    host: float
    """Share of them that host memory has."""

    @property
    def missed(self) -> float:
        """Bytes that come from the SSD over bytes of the prefix's KV."""
        return self.needed * (1 - self.device - self.host)


def replay(system: SystemConfig, case: Case, *, budget: float, stable: float) -> list[Seen]:
    """The measured requests of one system, after those that warm the caches."""
    rng = np.random.default_rng(SEED)
    chunks = -(-case.tokens // system.chunk_tokens)
    kinds = 1 if system.chunked else 2  # keys and values together, or apart
    each = kinds * chunks
    total = case.size_gb * GB
    pages = case.prefixes * each
    policy = POLICIES[system.policy] if isinstance(system.policy, str) else system.policy
    tiers = Tiers(
        int(pages * (DEVICE_BYTES - DEVICE_BUFFERS) / total),
        int(pages * (HOST_BYTES - HOST_BUFFERS) / total),
        each,
        policy,
    )
    bases = [tiers.register(each) for _ in range(case.prefixes)]
    own = [rng.permutation(_units(system, case)) for _ in range(case.prefixes)]
    drawn = normal_choice(rng, case.prefixes, WARM_UP + MEASURED).tolist()
    seen = []
    for number, prefix in enumerate(drawn):
        kinds_used = [
            np.concatenate(part)
            for part in zip(*_wanted(system, case, own[prefix], budget, stable, rng), strict=True)
        ]
        offsets, worth = kinds_used
        wanted = bases[prefix] + offsets.astype(np.int64)
        device, host = tiers.lookup(wanted)
        if number >= WARM_UP:
            seen.append(
                Seen(
                    needed=len(wanted) / each,
                    device=float((device >= 0).mean()),
                    host=float((host >= 0).mean()),
                )
            )
        request(tiers, wanted, worth)
    return seen


def _units(system: SystemConfig, case: Case) -> int:
    """How many chunks, or tokens, are chosen among."""
    return -(-case.tokens // system.chunk_tokens) if system.chunked else case.tokens


def _wanted(
    system: SystemConfig, case: Case, own: np.ndarray, budget: float, stable: float,
    rng: np.random.Generator,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """(offsets of pages, what is recorded for each): of keys, then of values."""
    units = len(own)
    chunks = -(-case.tokens // system.chunk_tokens)
    everything = np.arange(chunks), np.ones(chunks)
    count = max(1, round(budget * units))
    kept = round(stable * count)
    others = rng.choice(units - kept, count - kept, replace=False)
    chosen = np.concatenate([own[:kept], own[kept:][others]])
    if system.chunked:
        yield chosen, rng.exponential(size=count)
        return
    shares = np.bincount(chosen // system.chunk_tokens, minlength=chunks) / system.chunk_tokens
    important = np.flatnonzero(shares), shares[shares > 0]
    for part in range(2):
        all_of_it = system.selector == "all" or (system.selector == "h2o" and part == 0)
        offsets, worth = everything if all_of_it else important
        yield part * chunks + offsets, worth
