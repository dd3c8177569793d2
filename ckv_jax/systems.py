"""The systems by name: presets of one engine, nothing else. Papers' parameters are theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from ckv_jax.config import KeepName, PolicyName, Selector, SystemConfig, WidthsName
from ckv_jax.selection.coarse import Coarse
from ckv_jax.selection.select import Select
from ckv_jax.storage.codec import Codec
from ckv_jax.validate import WrongType

REORDER_EVERY = 4
"""IMPRESS's paper looks every ten minutes; a count of requests gives the same averages whatever the
load."""


def _rival(
    name: str,
    *,
    selector: Selector,
    policy: PolicyName,
    probe: Literal["heads", "none"] = "none",
    reorder_every: int = 0,
) -> SystemConfig:
    """Layer by layer, K and V apart in chunks of 64 tokens (IMPRESS §6.1)."""
    return SystemConfig(
        name=name,
        selector=selector,
        chunk_tokens=64,
        pack_layers=1,
        kv_together=False,
        period=1,
        subperiod=1,
        probe=probe,
        policy=policy,
        reorder_every=reorder_every,
    )


def _decode_rival(
    name: str,
    *,
    digest: Literal["int4", "pq", "means", "bounds", "means+cosines"],
    window: float,
    keep: KeepName = "lru",
    widths: WidthsName = "even",
    chunk_tokens: int = 16,
    sequential: bool = True,
    guessed: bool = False,
    question: int | None = None,
    each: bool = True,
    grouping: Literal["position", "alike"] = "position",
    outliers: float = 0.0,
) -> SystemConfig:
    """Every layer chooses by itself at every token, with `each` every KV head of it; see
    `docs/decode.md` for what is simplified."""
    return SystemConfig(
        name=name,
        selector="chunk",
        chunk_tokens=chunk_tokens,
        pack_layers=1,
        heads_apart=each,
        grouping=grouping,
        outliers=outliers,
        period=1,
        subperiod=1,
        probe="digest",
        digest=digest,
        prefetch="intra" if each else "inter",
        choose=Select(queries=question),
        decode=Select(guessed=guessed),
        window=window,
        keep=keep,
        widths=widths,
        sequential=sequential,
    )


def _everything(name: str, *, pack_layers: Literal[1, 4]) -> SystemConfig:
    """For a budget of 1: nothing is chosen, all of the prefix is attended to at every token."""
    return SystemConfig(
        name=name, selector="chunk", period=pack_layers, subperiod=pack_layers,
        pack_layers=pack_layers, probe="digest", digest="means",
    )  # fmt: skip


CKV = SystemConfig(
    name="ckv",
    selector="chunk",
    chunk_tokens=8,
    period=2,
    subperiod=2,
    pack_layers=2,
    probe="digest",
    digest="int4",
    keep_ends=True,
    speculate="lookahead",
    overfetch=1.25,
    speculate_always=False,
    choose=Select(score_layers=2, queries=16, peaks=True),
    decode=Select(score_layers=2, queries=4, peaks=True, coarse=Coarse(survivors=4, least=64)),
    widths="profiled",
    policy="frequency-attention",
)
"""Ours: see `bench/results/README.md` for what each number is worth on a real model."""

CKV_16 = replace(
    CKV,
    name="ckv-16",
    chunk_tokens=16,
    period=4,
    subperiod=4,
    pack_layers=4,
    choose=Select(score_layers=3, queries=16, peaks=True),
    decode=Select(score_layers=3, queries=4, peaks=True, coarse=Coarse(survivors=4, least=64)),
)
"""`ckv` over the chunks of stores that it wrote before: half the selections, a quarter of the
reads, and answers further from full attention's."""

DECODE_SYSTEMS: Mapping[str, SystemConfig] = MappingProxyType(
    {
        system.name: system
        for system in (
            _everything("dense", pack_layers=4),
            _everything("flexgen", pack_layers=1),
            _decode_rival("quest", digest="bounds", chunk_tokens=8, window=0),
            _decode_rival(
                "shadowkv",
                digest="means+cosines",
                chunk_tokens=8,
                window=1,
                outliers=48 / 16_384,  # 48 chunks of 128k tokens, and no larger share of fewer
            ),
            _decode_rival("retroinfer", digest="means", window=2, grouping="alike"),
            _decode_rival("infinigen", digest="int4", window=0, guessed=True, each=False),
            _decode_rival("pqcache", digest="pq", window=2, keep="lfu", each=False),
            _decode_rival(
                "kvdrive",
                digest="means",
                window=2,
                keep="lookahead",
                widths="profiled",
                sequential=False,
                question=32,  # its paper fills windows by 16 to 64 of them
                grouping="alike",
            ),
        )
    }
)
"""The published systems of long decode, beside `ckv`."""

SYSTEMS: Mapping[str, SystemConfig] = MappingProxyType(
    {
        system.name: system
        for system in (
            SystemConfig(name="recompute", selector="none", probe="none", prefetch="none"),
            _rival("as-lru", selector="all", policy="lru"),
            _rival("as-h2o-lru", selector="h2o", policy="lru"),
            _rival("as-h2o-lfu", selector="h2o", policy="lfu"),
            _rival(
                "impress",
                selector="impress",
                probe="heads",
                policy="importance-ratio",
                reorder_every=REORDER_EVERY,
            ),
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
            CKV,
            CKV_16,
            *DECODE_SYSTEMS.values(),
        )
    }
)


def system_named(name: str) -> SystemConfig:
    """The preset `name`; `ValueError` lists what there is."""
    if name not in SYSTEMS:
        raise ValueError(f"got system={name!r}, expected one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def preset(name: str, *, codec: str | Codec = "none") -> SystemConfig:
    """The preset `name` with packs encoded by a codec, or by the one of a name.

    Raises as `system_named`, and `ValueError` for a codec there is none of.
    """
    return replace(system_named(name), codec=codec)


def system_of(system: str | SystemConfig) -> SystemConfig:
    """A system given by its name, or itself.

    Raises `ValueError` for a name there is none of, `TypeError` for what is neither.
    """
    if isinstance(system, str):
        return system_named(system)
    if not isinstance(system, SystemConfig):
        raise WrongType(
            f"got system={system!r}, expected a SystemConfig or one of {', '.join(SYSTEMS)}"
        )
    return system
