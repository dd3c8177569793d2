"""Every program of a request gets its kernels on the targets that have them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import SMALL
from kernel_targets import H100, V5E

from ckv_jax.baselines.attention_store import EverythingCalls
from ckv_jax.baselines.h2o import KeyCalls
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Keys
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.model.decoder import Transformer
from ckv_jax.pipeline.layers import Layers
from ckv_jax.pipeline.pieces import Pieces
from ckv_jax.pipeline.programs import Programs
from ckv_jax.selection.base import Rule, Share
from ckv_jax.selection.select import Coarse, Stages

HEADS = {"0.5B": (14, 2, 64), "7B": (28, 4, 128)}
SUFFIX, CHUNKS, CHUNK, WIDE = 32, 24, 16, 64


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def whole(*shape: int) -> Any:
    return shaped(*shape, dtype=jnp.int32)


def traced(name: str, jitted: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """In place of a call: its result's shapes."""
    return jitted.eval_shape(*args, **named)


@pytest.mark.parametrize(("model", "target"), [("0.5B", H100), ("7B", V5E)], ids=["gpu", "tpu"])
def test_no_program_falls_back_to_a_reference(model: str, target: Target) -> None:
    heads, kv_heads, dim = HEADS[model]
    config = dataclasses.replace(
        SMALL, num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim
    )
    layers = Layers(Transformer.abstract(config, dtype="bfloat16", out_first=True, target=target))
    assert layers.kv_dtype == jnp.bfloat16
    width, both = kv_heads * dim, range(2)
    start, lengths = whole(1), whole(1)
    with layers.programs.watch(traced):
        hidden = layers.embed(whole(1, SUFFIX))
        pages = shaped(64, 4, 2, CHUNK, width)
        hidden, _ = layers.run(both, hidden, start, pages, whole(2, 1, CHUNKS))
        rows = shaped(1, 512, width)
        none = (shaped(1, 4, 2, 1, width), whole(2, 1, 0))
        layers.extend(both, hidden, start, ((rows, rows),) * 2, start, *none, context=512)
        token = shaped(1, 1, config.hidden_size)
        packs = (pages, whole(2, 1, CHUNKS))
        layers.extend(both, token, start, ((rows, rows),) * 2, start, *packs, context=512)
        tokens = CHUNK * CHUNKS
        codes = shaped(tokens, kv_heads, dim // 2, dtype=jnp.uint8)
        scale = shaped(tokens, kv_heads, dtype=jnp.float32)
        for probe in (Keys(shaped(tokens, kv_heads, dim)), Int4Keys(codes, scale)):
            share = Share(shaped(1, dtype=jnp.float32), whole(1))
            layers.select(
                layers.scorer([0], [probe]), hidden, start, lengths, whole(), whole(), whole(1),
                Rule(n=8, chunk_tokens=CHUNK), share,
            )  # fmt: skip
            layers.select(
                layers.scorer(both, [probe] * 2), shaped(2, SUFFIX, config.hidden_size), whole(2),
                whole(2), whole(), whole(), whole(2),
                Rule(n=8, chunk_tokens=CHUNK, window=4, stages=Stages(Coarse(), 8, True)),
                Share(shaped(2, dtype=jnp.float32), whole(2)),
            )  # fmt: skip
        pieces = Pieces(layers)
        part = pieces.open(0, hidden, start)
        part = pieces.over_pages(part, 0, pages, whole(1, CHUNKS), whole(1, CHUNKS))
        part = pieces.over_rows(part, rows, rows)
        pieces.close(0, hidden, part)
        pieces.close(0, hidden, part, (rows, rows), start)
        keys, everything = KeyCalls(layers), EverythingCalls(layers)
        apart = shaped(64, 1, 1, WIDE, width)
        qkv = keys.project(0, hidden, start)
        keys.select_by_keys(qkv, lengths, apart, whole(CHUNKS), whole(), whole(1), n=16)
        keys.attend_tokens(0, hidden, qkv, apart, whole(CHUNKS), whole(CHUNKS), whole(1, 16))
        everything.attend_all(0, hidden, start, apart, whole(CHUNKS), whole(CHUNKS), whole(CHUNKS))
    made = [one for _, some in layers.programs.dispatched for one in some]
    assert {one.kernel for one in made} == {"attend", "gather", "score"}
    wanted = {"gpu": "mosaic_gpu", "tpu": "tpu"}[target.platform]
    assert {one.implementation for one in made} == {wanted} and not any(one.refused for one in made)


def test_functions_of_one_name_are_told_apart() -> None:
    programs = Programs()
    for times in (2, 3):
        found = programs.jit(lambda x, times=times: times * x)(np.ones(1, np.int32))
        assert found.tolist() == [times]
    assert len(programs) == len(programs.dispatched) == 2
