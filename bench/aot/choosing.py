"""Programs besides attention: selections of decode, and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from bench.aot.shapes import (
    CALL_LAYERS,
    CALLS,
    CHUNK,
    PACK,
    PREFIX,
    WINDOW_ROWS,
    Program,
    Sizes,
    abstract,
    ints,
    of,
)
from ckv_jax.decode.token import Inputs, Recent, Scoring, SelectCall, States, Token
from ckv_jax.decode.window import WindowArrays, lookahead
from ckv_jax.model.sampling import SamplingArrays, sample
from ckv_jax.pipeline.plan import Plan
from ckv_jax.pipeline.resident import PackMap
from ckv_jax.selection.base import Rule
from ckv_jax.selection.select import Coarse, Stages
from ckv_jax.systems import system_named


def _call(
    sizes: Sizes, layers: Sequence[int], kind: str, places: np.ndarray, rule: Rule, prefixes: int
) -> SelectCall:
    states = tuple(map(sizes.layers.state, layers))
    probes = ((sizes.probe(kind, sizes.chunks * CHUNK),) * len(layers),) * prefixes
    tokens = np.full(prefixes, PREFIX, np.int32)
    return SelectCall(
        tuple(layers), states, places, probes, tokens, -(-tokens // CHUNK), places, rule, lookahead
    )


def _anew(
    system: str, kind: str, coarse: Coarse | None = None, *, prefixes: int = 1
) -> Callable[[Sizes], Program]:
    """What one token of each of some prefixes chooses as `system` does, and what of it a window
    lacks."""
    stages = None if coarse is None else Stages(coarse, 64, some_whole=False)

    def program(sizes: Sizes) -> Program:
        preset = system_named(system)
        assert preset.decode is not None
        layers = range(preset.decode.score_layers)
        tokens, n = sizes.chunks * CHUNK, sizes.chosen
        slots = max(n, math.ceil(n * preset.window))
        window = WindowArrays(*(ints(prefixes, slots) for _ in WindowArrays._fields))
        queries = preset.decode.queries or 1
        scores = cast(Any, abstract((queries * (queries > 1), prefixes, sizes.chunks), jnp.float32))
        recent = Recent(scores, ints(prefixes, n))
        calls = sizes.scores(kind, len(layers)) + (stages is not None)
        places = np.arange(prefixes, dtype=np.int32)
        scoring = Scoring(sizes.layers)
        rule = Rule(n=n, chunk_tokens=CHUNK, peaks=preset.decode.peaks, stages=stages)
        call = _call(sizes, layers, kind, places, rule, prefixes)
        return of(
            sizes,
            lambda: scoring.select(call, sizes.hidden(prefixes, 1), places, window, places, recent),
            kernels=prefixes * calls,
            sums=prefixes * (1 + (stages is not None)),
            tokens=prefixes,
            room=16 * prefixes * tokens * sizes.config.num_heads,
        )

    return program


def _token(batch: int) -> Callable[[Sizes], Program]:
    """A whole token of each row over one prefix, of a model of two periods."""

    def program(sizes: Sizes) -> Program:
        preset, tokens, n = system_named("ckv"), sizes.chunks * CHUNK, sizes.chosen
        assert preset.decode is not None
        plan = Plan.of(CALL_LAYERS, preset)
        scoring, places = Scoring(sizes.layers), np.arange(batch, dtype=np.int32)
        rule = Rule(n=n, chunk_tokens=CHUNK, peaks=True)
        calls = [
            _call(sizes, plan.scoring_layers(period, PACK), "int4", places, rule, 1)
            for period in range(plan.periods)
        ]
        token = Token(sizes.layers, scoring, plan, CALLS)
        [run] = token.runs(calls, n)
        window = WindowArrays(*(ints(batch, 2 * n) for _ in WindowArrays._fields))
        scores = cast(Any, abstract((preset.decode.queries, batch, sizes.chunks), jnp.float32))
        recent = Recent(scores, ints(batch, n))
        where = PackMap(ints(1, plan.group_table.size, sizes.chunks), ints(1, sizes.chunks))
        buffer, pool = sizes.rows(batch, WINDOW_ROWS), sizes.pool()
        words = sizes.config.vocab_size
        return of(
            sizes,
            lambda: token.step(
                [(run, States((window,) * plan.periods, (recent,) * plan.periods))],
                sizes.hidden(batch, 1), ints(), [((buffer, buffer),) * PACK] * plan.periods,
                Inputs(
                    *(ints(batch) for _ in range(3)), pool, *(ints(batch) for _ in range(3)), where,
                    _params(batch), ints(batch),
                ),
                compiles=True,
            ),
            kernels=CALL_LAYERS + sizes.scores("int4", PACK) * plan.periods,
            sums=2 * CALL_LAYERS + plan.periods,
            tokens=batch,
            big=(pool.shape,),
            room=16 * batch * tokens * sizes.config.num_heads + 16 * 4 * batch * words,
        )  # fmt: skip

    return program


def _params(batch: int) -> SamplingArrays:
    return SamplingArrays(
        temperature=abstract((batch,), jnp.float32), top_p=abstract((batch,), jnp.float32),
        top_k=ints(batch), seed=abstract((batch,), jnp.uint32),
    )  # fmt: skip


def _sample(batch: int) -> Callable[[Sizes], Program]:
    """The next token of each row by temperature, top-k and top-p."""

    def program(sizes: Sizes) -> Program:
        words = sizes.config.vocab_size
        return Program(
            jitted=sample,
            args=(abstract((batch, words), jnp.float32), _params(batch), ints(batch)),
            tokens=batch, room=16 * 4 * batch * words,
        )  # fmt: skip

    return program


CHOOSING: Mapping[str, Callable[[Sizes], Program]] = MappingProxyType(
    {
        "choose": _anew("ckv", "int4"),
        "choose-b8": _anew("ckv", "int4", prefixes=8),
        "choose-coarse": _anew("ckv", "int4", Coarse()),
        "choose-means": _anew("kvdrive", "means"),
        "choose-pq": _anew("pqcache", "pq"),
        "token": _token(1),
        "sample-b8": _sample(8),
    }
)
"""By name."""
