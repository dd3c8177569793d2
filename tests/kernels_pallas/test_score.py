from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_targets import CPU, NATIVE, OF, WIDENING_CPU

from ckv_jax.kernels_pallas.score import reference, score
from ckv_jax.kernels_pallas.score.probe import Int4Keys, Keys, PqKeys, Probe
from ckv_jax.kernels_pallas.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    queries: int = 9
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    chunk: int = 16
    tokens: int = 208  # no multiple of any block of keys
    num_tokens: int = 199
    lengths: tuple[int, ...] = (9, 4)
    far: tuple[int, ...] = ()  # queries with such a number


FAR = "one number far above the others"
CASES = {
    "ragged": Case(),
    "fewer keys than a block": Case(tokens=32, num_tokens=32, lengths=(9,)),
    "more rows than a tile": Case(queries=37, heads=8, lengths=(37, 0)),
    "no tokens": Case(num_tokens=0),
    FAR: Case(far=(1, 5), dim=96),
}
"""The last is of another kind for a CPU's native kernels alone."""


def make_probe(rng: np.random.Generator, kind: str, case: Case) -> tuple[Probe, np.ndarray]:
    """A probe, NaN past its last token, and the keys float64 [T, K, D] that it stands for."""
    shape = (case.tokens, case.kv_heads, case.dim)
    past = np.arange(case.tokens) >= case.num_tokens
    scale = rng.uniform(0.01, 0.02, shape[:2]).astype(np.float32)
    if kind == "keys":
        keys = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        return Keys(jnp.where(past[:, None, None], jnp.nan, keys)), np.asarray(keys, np.float64)
    if kind == "int4":
        codes = rng.integers(0, 256, (*shape[:2], case.dim // 2), dtype=np.uint8)
        values = np.concatenate([codes & 15, codes >> 4], axis=2).astype(np.float64) - 8
        exact = values * (10 * scale[:, :, None])
        scale[past] = np.nan
        return Int4Keys(jnp.asarray(codes), jnp.asarray(10 * scale)), exact
    subspaces = case.dim // 8
    codes = rng.integers(0, 256, (*shape[:2], subspaces), dtype=np.uint8)
    books = rng.standard_normal((case.kv_heads, subspaces, 256, 8))
    books = np.asarray(jnp.asarray(books, jnp.bfloat16), np.float32)
    heads, parts = np.arange(case.kv_heads)[None, :, None], np.arange(subspaces)[None, None, :]
    exact = books[heads, parts, codes].reshape(shape).astype(np.float64)
    return PqKeys(jnp.asarray(codes), jnp.asarray(books)), exact


def make_queries(rng: np.random.Generator, case: Case) -> jax.Array:
    """Queries past their length are NaN."""
    q = rng.standard_normal((len(case.lengths), case.queries, case.heads, case.dim))
    for b, length in enumerate(case.lengths):
        q[b, length:] = np.nan
    q[:, list(case.far), :, 7] *= 50
    return jnp.asarray(q, jnp.bfloat16)


def expected(q: np.ndarray, keys: np.ndarray, case: Case) -> np.ndarray:
    """Equation 1 in float64, [B, K, M]."""
    out = np.zeros((len(case.lengths), case.kv_heads, case.tokens))
    group = case.heads // case.kv_heads
    for b, h in np.ndindex(len(case.lengths), case.heads):
        for i in range(case.lengths[b]):
            logits = keys[: case.num_tokens, h // group] @ q[b, i, h] / np.sqrt(case.dim)
            if case.num_tokens:
                logits = np.exp(logits - logits.max())
                out[b, h // group, : case.num_tokens] += logits / logits.sum()
    return out.reshape(*out.shape[:2], -1, case.chunk).sum(axis=3)


def expected_peaks(q: np.ndarray, keys: np.ndarray, case: Case) -> np.ndarray:
    """Weighed masses and their squares in float64, [2, B, K, M]."""
    group = case.heads // case.kv_heads
    alone = dataclasses.replace(case, heads=case.kv_heads, lengths=(1,))
    out = np.zeros((2, len(case.lengths), case.kv_heads, case.tokens // case.chunk))
    for b, length in enumerate(case.lengths):
        for i in range(length):
            for g in range(group):  # one query head of each KV head
                mass = expected(q[b : b + 1, i : i + 1, g::group], keys, alone)[0] / (length - i)
                out[:, b] += np.stack([mass, mass**2])
    return out


def multiplied(q: jax.Array, implementation: str) -> np.ndarray:
    """The queries that an implementation multiplies keys with: a CPU's native kernel rounds each to
    127ths of its largest number, or to 127 * 256ths where that is far above the others."""
    exact = np.asarray(q, np.float64)
    if implementation not in NATIVE:
        return exact
    most = np.abs(exact).max(axis=-1, keepdims=True)
    far = most > 8 * np.sqrt(np.square(exact).mean(axis=-1, keepdims=True))
    levels = np.where(far, 127 * 256, 127)
    inverse = levels.astype(np.float32) / most.astype(np.float32)
    return np.rint(exact * inverse) * most / levels


ALL = ("reference", "widened", "tpu", "mosaic_gpu")
BY = {"keys": (*ALL, NATIVE[0]), "int4": (*ALL, *NATIVE), "pq": ("reference", "widened", NATIVE[0])}
"""Implementations by kind of probe. A CPU's native kernel takes int4 keys, and refuses others."""
ROWS = [
    (implementation, kind, name, peaks)
    for kind, name, peaks in [
        *((kind, name, False) for kind in ("keys", "int4") for name in CASES),
        *(("pq", name, False) for name in ("ragged", "fewer keys than a block")),
        ("keys", "ragged", True),
        *(("int4", name, True) for name in CASES if name != "fewer keys than a block"),
    ]
    for implementation in BY[kind]
    if name != FAR or implementation in NATIVE
]


@pytest.mark.parametrize(("implementation", "kind", "name", "peaks"), ROWS)
def test_agrees_with_float64(
    kernel: Callable[..., Any], implementation: str, kind: str, name: str, peaks: bool
) -> None:
    case, rng = CASES[name], np.random.default_rng(0)
    probe, keys = make_probe(rng, kind, case)
    q = make_queries(rng, case)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    args = ("score", q, probe, jnp.int32(case.num_tokens), lengths, case.chunk, peaks)
    if implementation in NATIVE and kind != "int4":
        with pytest.raises(NotImplementedError, match="expected int4 keys"):
            kernel(*args)
        return
    found = kernel(*args)
    exact_q = multiplied(q, implementation)
    wanted = (expected_peaks if peaks else expected)(exact_q, keys, case)
    rtol = 2e-4 if peaks else 1e-4  # of float32 sums
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("kind", BY)
def test_keys_in_blocks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, rng = Case(), np.random.default_rng(0)
    probe, _ = make_probe(rng, kind, case)
    args = (make_queries(rng, case), probe, jnp.int32(150), jnp.asarray(case.lengths, jnp.int32))
    whole = jax.jit(partial(reference, chunk_tokens=case.chunk))(*args)
    for chunks in (1, 3, 9):  # in 13 blocks, in 5 with padding, in 2 with padding
        of_key = 4 * 2 * 9 * 4 + 2 * case.kv_heads * case.dim
        monkeypatch.setattr("ckv_jax.kernels_pallas.score._BLOCK_BYTES", of_key * 16 * chunks)
        by_blocks = jax.jit(partial(reference, chunk_tokens=case.chunk))(*args)
        np.testing.assert_allclose(by_blocks, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", [CPU, WIDENING_CPU])
@pytest.mark.parametrize("batch", [1, 32])
def test_a_selection_by_four_layers_takes_little_memory(batch: int, target: Target) -> None:
    """Beyond 32 MiB the allocator maps, and faults in, fresh pages for every call."""
    rng = np.random.default_rng(0)
    case = Case(
        queries=4, tokens=5120, num_tokens=5008, heads=8, kv_heads=4, dim=128, lengths=(4,) * batch
    )
    probes = tuple(make_probe(rng, "int4", case)[0] for _ in range(4))

    def run(q: jax.Array, probes: tuple[Probe, ...], tokens: jax.Array, n: jax.Array) -> jax.Array:
        return sum(
            (score(q, p, num_tokens=tokens, q_lengths=n, chunk_tokens=16, target=target))
            for p in probes
        )

    lengths = jnp.asarray(case.lengths, jnp.int32)
    call = jax.jit(run).lower(make_queries(rng, case), probes, jnp.int32(5008), lengths)
    memory = call.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 32 * 2**20


def test_keys_as_bit_patterns() -> None:
    case, rng = Case(), np.random.default_rng(0)
    probe, _ = make_probe(rng, "keys", case)
    assert isinstance(probe, Keys)
    bits = Keys(jax.lax.bitcast_convert_type(probe.keys, jnp.uint16))
    rest: dict[str, Any] = {
        "target": CPU,
        "num_tokens": jnp.int32(199),
        "q_lengths": jnp.asarray(case.lengths, jnp.int32),
        "chunk_tokens": case.chunk,
    }
    q = make_queries(rng, case)
    run = jax.jit(score, static_argnames=("chunk_tokens", "target"))
    for target in (CPU, WIDENING_CPU):
        rest["target"] = target
        np.testing.assert_array_equal(run(q, bits, **rest), run(q, probe, **rest))
    for name in ("mosaic_gpu", "tpu"):
        with pytest.raises(NotImplementedError, match="uint16"):
            score(q, bits, **rest | {"target": OF[name]}, implementation=name)


def test_no_logits_of_all_keys_in_memory() -> None:
    """32 queries of 28 heads over 32,768 keys would be 117 MB; codes are 8."""

    def run(q: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        probe = Int4Keys(codes, scale)
        lengths = jnp.asarray([32], jnp.int32)
        return score(
            q, probe, num_tokens=jnp.int32(32768), q_lengths=lengths, chunk_tokens=16, target=CPU
        )

    shapes = (
        jax.ShapeDtypeStruct((1, 32, 28, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((32768, 4, 64), jnp.uint8),
        jax.ShapeDtypeStruct((32768, 4), jnp.float32),
    )
    memory = jax.jit(run).lower(*shapes).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 40e6


def test_says_what_it_got() -> None:
    case, rng = Case(), np.random.default_rng(0)
    q = make_queries(rng, case)
    probe, _ = make_probe(rng, "int4", case)
    product, _ = make_probe(rng, "pq", case)
    assert isinstance(probe, Int4Keys) and isinstance(product, PqKeys)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    good = {"q": q, "probe": probe, "num_tokens": jnp.int32(9), "q_lengths": lengths}
    for wrong, said in (
        ({"chunk_tokens": 15}, "multiple of chunk_tokens 15"),
        ({"num_tokens": jnp.float32(9)}, "int32 scalar"),
        ({"q_lengths": jnp.zeros(3, jnp.int32)}, "got q_lengths"),
        ({"probe": Int4Keys(probe.codes, probe.scale[:5])}, "got scale"),
        ({"q": q[..., :32]}, "got q"),
        ({"probe": PqKeys(product.codes, product.codebooks[:, :, :16])}, "got codebooks"),
        ({"probe": Keys(jnp.zeros((208, 2, 64), jnp.uint8))}, "bit patterns"),
    ):
        with pytest.raises(ValueError, match=said):
            score(**{"chunk_tokens": 16} | good | wrong, target=CPU)
