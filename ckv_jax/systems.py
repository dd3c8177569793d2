"""The systems by name: presets of one engine, nothing else. Papers' parameters are theirs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ckv_jax.config import SystemConfig

SYSTEMS: Mapping[str, SystemConfig] = MappingProxyType(
    {
        system.name: system
        for system in (
            SystemConfig(name="recompute", selector="all", probe="none", prefetch="none"),
            SystemConfig(
                name="contiguous-kv",
                selector="chunk",
                period=8,
                subperiod=4,
                pack_layers=4,
                probe="keys",
                speculate="previous",
                policy="attention",
            ),
            SystemConfig(
                name="ckv",
                selector="chunk",
                period=4,
                subperiod=4,
                pack_layers=4,
                probe="digest",
                digest="int8",
                speculate="lookahead",
                policy="attention",
            ),
        )
    }
)


def system_named(name: str) -> SystemConfig:
    """The preset `name`; `ValueError` lists what there is."""
    if name not in SYSTEMS:
        raise ValueError(f"got system={name!r}, expected one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
