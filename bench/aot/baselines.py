"""The calls of the layer-by-layer systems as programs to compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from bench.aot.shapes import (
    BASELINE_CHUNK,
    BASELINE_TOKENS,
    PREFIX,
    SUFFIX,
    Program,
    Sizes,
    abstract,
    ints,
    of,
)
from ckv_jax.baselines.attention_store import EverythingCalls
from ckv_jax.baselines.h2o import KeyCalls
from ckv_jax.baselines.impress import PROBE_HEADS, ProbeCalls
from ckv_jax.baselines.layerwise import TokenSelection


def _baseline(name: str) -> Callable[[Sizes], Program]:
    def program(sizes: Sizes) -> Program:
        everything, keys, probe = (
            kind(sizes.layers) for kind in (EverythingCalls, KeyCalls, ProbeCalls)
        )
        pool = sizes.pool(layers=1, kinds=1, chunk=BASELINE_CHUNK)
        chunks = -(-PREFIX // BASELINE_CHUNK)
        tokens, chosen = chunks * BASELINE_CHUNK, BASELINE_TOKENS
        hidden, config = sizes.hidden(1, SUFFIX), sizes.config
        heads, dim = config.num_kv_heads, config.head_dim
        width = -(-PROBE_HEADS // (config.num_heads // heads))
        k = abstract((1, SUFFIX, heads, dim))
        qkv = (sizes.queries(1, SUFFIX), k, k)
        table = ints(chunks)
        calls: dict[str, tuple[int, Callable[[], Any]]] = {
            "project": (0, lambda: keys.project(0, hidden, ints(1))),
            "by-keys": (
                1,
                lambda: keys.select_by_keys(
                    qkv, ints(1), pool, table, ints(), ints(1), n=chosen
                ),
            ),
            "by-probe": (
                0,
                lambda: probe.select_by_probe(
                    qkv, ints(1), abstract((tokens, width, dim)), ints(),
                    ints(1), n=chosen, heads=PROBE_HEADS, chunk_tokens=BASELINE_CHUNK,
                ),
            ),
            "by-heads": (
                1,
                lambda: probe.select_by_heads(
                    qkv, ints(1), pool, table, ints(), ints(1), _trusted(chunks, tokens, chosen),
                    abstract((1,), jnp.bool_), n=chosen,
                ),
            ),
            "attend-tokens": (
                3,
                lambda: keys.attend_tokens(0, hidden, qkv, pool, table, table, ints(1, chosen)),
            ),
            "attend-heads": (
                3,
                lambda: keys.attend_tokens(
                    0, hidden, qkv, pool, table, table, ints(1, heads, chosen)
                ),
            ),
            "attend-all": (
                1, lambda: everything.attend_all(0, hidden, ints(1), pool, table, table, table)
            ),
        }  # fmt: skip
        kernels, call = calls[name]
        scores = 16 * sizes.config.num_heads * SUFFIX * tokens  # float32, a few of them at a time
        room = scores if name.startswith("by") else 0
        return of(sizes, call, kernels=kernels, tokens=SUFFIX, big=(pool.shape,), room=room)

    return program


def _trusted(chunks: int, tokens: int, chosen: int) -> TokenSelection:
    """What IMPRESS's probe heads chose, where only some rows fall back to every head's own."""
    return TokenSelection(
        ids=ints(1, chosen), counts=ints(1, chunks), mass=abstract((1,), jnp.float32),
        similarity=abstract((1,), jnp.float32), importance=abstract((tokens,), jnp.float32),
    )  # fmt: skip


BASELINES: Mapping[str, Callable[[Sizes], Program]] = MappingProxyType(
    {
        f"baseline-{one}": _baseline(one)
        for one in "project by-keys by-probe by-heads attend-tokens attend-heads attend-all".split()
    }
)
"""By name."""
