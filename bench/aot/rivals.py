"""The calls of the layer-by-layer systems as programs to compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from bench.aot.program import Program, of
from bench.aot.shapes import PREFIX, RIVAL_CHUNK, RIVAL_TOKENS, SUFFIX, Sizes, abstract, ints
from ckv_jax.kernels_pallas.gather.api import gather
from ckv_jax.rivals.layers import Choice, RivalLayers
from ckv_jax.systems import SYSTEMS


def _gather(sizes: Sizes) -> Program:
    pool = sizes.pool(layers=1, kinds=1, chunk=RIVAL_CHUNK)
    table = ints(1, -(-PREFIX // RIVAL_CHUNK))
    return Program(
        jitted=jax.jit(partial(gather, target=sizes.target)),
        args=(pool, table),
        named={},
        kernels=1,
        tokens=0,
        big=(pool.shape,),
    )


def _rival(name: str) -> Callable[[Sizes], Program]:
    def program(sizes: Sizes) -> Program:
        own = RivalLayers(sizes.layers)
        pool = sizes.pool(layers=1, kinds=1, chunk=RIVAL_CHUNK)
        chunks = -(-PREFIX // RIVAL_CHUNK)
        tokens, chosen = chunks * RIVAL_CHUNK, RIVAL_TOKENS
        hidden, config = sizes.hidden(1, SUFFIX), sizes.config
        heads, dim = config.num_kv_heads, config.head_dim
        impress = SYSTEMS["impress"]
        width = impress.probe_width(config.num_heads, heads)
        k = abstract((1, SUFFIX, heads, dim))
        qkv = (sizes.queries(1, SUFFIX), k, k)
        table = ints(chunks)
        calls: dict[str, tuple[int, Callable[[], Any]]] = {
            "project": (0, lambda: own.project(0, hidden, ints(1))),
            "by-keys": (
                1, lambda: own.choose_by_keys(qkv, ints(1), pool, table, ints(), ints(1), n=chosen),
            ),
            "by-probe": (
                0,
                lambda: own.choose_by_probe(
                    qkv, ints(1), abstract((tokens, width, dim)), ints(),
                    ints(1), n=chosen, heads=impress.probe_heads, chunk_tokens=RIVAL_CHUNK,
                ),
            ),
            "by-heads": (
                1,
                lambda: own.choose_by_heads(
                    qkv, ints(1), pool, table, ints(), ints(1), _trusted(chunks, tokens, chosen),
                    abstract((1,), jnp.bool_), n=chosen,
                ),
            ),
            "attend-tokens": (
                3,
                lambda: own.attend_tokens(0, hidden, qkv, pool, table, table, ints(1, chosen)),
            ),
            "attend-heads": (
                3,
                lambda: own.attend_tokens(
                    0, hidden, qkv, pool, table, table, ints(1, heads, chosen)
                ),
            ),
            "attend-all": (
                1, lambda: own.attend_all(0, hidden, ints(1), pool, table, table, table)
            ),
        }  # fmt: skip
        kernels, call = calls[name]
        scores = 16 * sizes.config.num_heads * SUFFIX * tokens  # float32, a few of them at a time
        room = scores if name.startswith("by") else 0
        return of(sizes, call, kernels=kernels, tokens=SUFFIX, big=(pool.shape,), room=room)

    return program


def _trusted(chunks: int, tokens: int, chosen: int) -> Choice:
    """What IMPRESS's probe heads chose, where only some rows fall back to every head's own."""
    return Choice(
        ids=ints(1, chosen), counts=ints(1, chunks), mass=abstract((1,), jnp.float32),
        similarity=abstract((1,), jnp.float32), importance=abstract((tokens,), jnp.float32),
    )  # fmt: skip


RIVALS: Mapping[str, Callable[[Sizes], Program]] = MappingProxyType(
    {
        "rival-gather": _gather,
        **{
            f"rival-{name}": _rival(name)
            for name in (
                "project",
                "by-keys",
                "by-probe",
                "by-heads",
                "attend-tokens",
                "attend-heads",
                "attend-all",
            )
        },
    }
)
"""By name."""
