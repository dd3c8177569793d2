"""Every kernel lowers for its platform on a machine without it, at the shapes of Qwen2.5-7B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from kernel_targets import OF

from ckv_jax.kernels_pallas.attend import attend
from ckv_jax.kernels_pallas.gather import gather
from ckv_jax.kernels_pallas.score import score
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Keys, Probe

PLATFORMS = {"mosaic_gpu": ("cuda", "mosaic_gpu"), "tpu": ("tpu", "tpu_custom_call")}
TOKENS, KV_HEADS, HEADS, DIM, CHUNK, QUERIES = 5008, 4, 28, 128, 16, 32


def shaped(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(params=list(PLATFORMS))
def name(request: pytest.FixtureRequest) -> str:
    """An implementation for an accelerator."""
    return str(request.param)


@pytest.fixture
def lower(name: str) -> Callable[..., None]:
    """lower(function, *shapes) lowers function(..., target=..., implementation=...)."""
    platform, custom_call = PLATFORMS[name]

    def check(function: Callable[..., Any], *args: Any) -> None:
        run = jax.jit(lambda *a: function(*a, target=OF[name], implementation=name))
        traced = run.trace(*args)
        assert custom_call in traced.lower(lowering_platforms=(platform,)).as_text()

    return check


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_gather(lower: Callable[..., None], dtype: str) -> None:
    pages = shaped(jnp.dtype(dtype), 512, 2, CHUNK, KV_HEADS, DIM)
    lower(gather, pages, shaped(jnp.int32, 1, 79))


def test_gather_of_tokens(lower: Callable[..., None]) -> None:
    tokens = shaped(jnp.bfloat16, 512 * CHUNK, KV_HEADS * DIM)
    lower(gather, tokens, shaped(jnp.int32, 2, 250))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(HEADS, KV_HEADS, DIM), (14, 2, 64)])
@pytest.mark.parametrize(("chunks", "chunk"), [(0, 16), (16, 16), (79, 16), (79, 64)])
def test_attend(
    lower: Callable[..., None], heads: int, kv_heads: int, dim: int, chunks: int, chunk: int
) -> None:
    table = shaped(jnp.int32, 2, chunks)
    new = shaped(jnp.bfloat16, 2, QUERIES, kv_heads * dim)
    lower(
        attend,
        shaped(jnp.bfloat16, 2, QUERIES, heads, dim),
        shaped(jnp.bfloat16, 512, chunk, kv_heads * dim),
        *[table] * 3,
        *[new] * 2,
        shaped(jnp.int32, 2),
    )


@pytest.mark.parametrize("kind", [Keys, Int4Keys])
def test_score(lower: Callable[..., None], kind: type[Probe]) -> None:
    scale = shaped(jnp.float32, TOKENS, KV_HEADS)
    parts: dict[type[Probe], tuple[jax.ShapeDtypeStruct, ...]] = {
        Keys: (shaped(jnp.bfloat16, TOKENS, KV_HEADS, DIM),),
        Int4Keys: (shaped(jnp.uint8, TOKENS, KV_HEADS, DIM // 2), scale),
    }

    def run(q: Any, count: Any, lengths: Any, *probe: Any, **how: Any) -> Any:
        return score(
            q, kind(*probe), num_tokens=count, q_lengths=lengths, chunk_tokens=CHUNK, **how
        )

    q = shaped(jnp.bfloat16, 1, QUERIES, HEADS, DIM)
    lower(run, q, shaped(jnp.int32), shaped(jnp.int32, 1), *parts[kind])
