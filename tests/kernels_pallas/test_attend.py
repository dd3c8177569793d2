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
from kernel_targets import CPU, NATIVE, OF, native_at

from ckv_jax.kernels_pallas import cpu
from ckv_jax.kernels_pallas.attend import attend, merge, reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    dtype: str = "bfloat16"
    queries: int = 9
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    chunk: int = 64
    table: tuple[tuple[int, ...], ...] = ((3, 3, 0, 5, 1), (2, -1, 7, 4, 99))
    lengths: tuple[tuple[int, ...], ...] = ((99, 99, 5, 0, 99), (99, 99, 1, 99, 99))
    new: int = 12
    start: tuple[int, ...] = (0, 3)


CASES = {
    "invalid and partial pages": Case(),
    "more rows than a tile": Case(queries=37, heads=6, new=40, start=(2, -5)),
    "no pages": Case(table=((), ()), lengths=((), ()), queries=150, new=150, start=(0, -60)),
    "no pages, keys before": Case(table=((), ()), lengths=((), ()), new=300, start=(280, 130)),
    "nothing to see": Case(lengths=((0,) * 5,) * 2, start=(-9, -20)),
    "more pages than a piece": Case(
        table=((3, 3, 0, 5, 1, 2) * 3, (-1,) * 8 + (2, 7) * 5),
        lengths=((99, 99, 5, 0, 99, 64) * 3, (99,) * 18),
    ),
}
FURTHER_CASES = {
    "chunks of 16": Case(chunk=16),
    "no new tokens": Case(new=0, start=(0, 0)),
    "a page or two": Case(table=((3, 3), (2, 7)), lengths=((64, 9), (64, 64)), new=2, start=(0, 0)),
    "no pages, float32": Case(table=((), ()), lengths=((), ()), dtype="float32", dim=32),
    "no pages, one head of 128": Case(
        table=((), ()), lengths=((), ()), dim=128, kv_heads=1, heads=3, new=64, start=(50, 0)
    ),
    "nothing at all": Case(table=((), ()), lengths=((), ()), new=0, start=(0, 0)),
    "one query": Case(queries=1, heads=2, new=1, start=(0, 0)),
    "float16": Case(dtype="float16", dim=128),
    "float32": Case(dtype="float32", dim=32, heads=2),
}


def arguments(case: Case) -> tuple[Any, ...]:
    """Fresh inputs; NaN wherever nobody may look."""
    rng = np.random.default_rng(0)
    count, table = 8, np.asarray(case.table, np.int32)
    batch, entries = table.shape
    v_table = np.where(table >= 0, (table + 1) % count, table).astype(np.int32)
    v_table = np.where(table >= count, table, v_table)
    lengths = np.asarray(case.lengths, np.int32).reshape(batch, entries)
    lengths = np.minimum(lengths, case.chunk)
    shape = (count, case.chunk, case.kv_heads, case.dim)
    pages = rng.standard_normal(shape)
    q = rng.standard_normal((batch, case.queries, case.heads, case.dim))
    new = rng.standard_normal((2, batch, case.new, case.kv_heads, case.dim))
    seen = np.zeros((count, case.chunk), bool)
    for b, n in np.ndindex(batch, entries):
        if 0 <= table[b, n] < count:
            keep = np.arange(case.chunk) < lengths[b, n]
            seen[table[b, n]] |= keep
            seen[v_table[b, n]] |= keep
    pages[~seen] = np.nan
    for b in range(batch):
        new[:, b, max(0, case.start[b] + case.queries) :] = np.nan

    def rows(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x.reshape(*x.shape[:2], case.kv_heads * case.dim), case.dtype)

    return (
        jnp.asarray(q, case.dtype),
        rows(pages),
        jnp.asarray(table),
        jnp.asarray(v_table),
        jnp.asarray(lengths),
        rows(new[0]),
        rows(new[1]),
        jnp.asarray(case.start, jnp.int32),
    )


def expected(args: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Token by token in float64."""
    q, *kv = (np.asarray(args[i], np.float64) for i in (0, 1, 5, 6))
    pages, k_new, v_new = (
        x.reshape(*x.shape[:2], x.shape[2] // q.shape[3], q.shape[3]) for x in kv
    )
    k_table, v_table, lengths, start = (np.asarray(args[i]) for i in (2, 3, 4, 7))
    batch, queries, heads, dim = q.shape
    count, chunk, kv_heads, _ = pages.shape
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, i, h in np.ndindex(batch, queries, heads):
        head = h // (heads // kv_heads)
        keys, values = [], []
        for n in range(k_table.shape[1]):
            if not (0 <= k_table[b, n] < count and 0 <= v_table[b, n] < count):
                continue
            for c in range(min(chunk, lengths[b, n])):
                keys.append(pages[k_table[b, n], c, head])
                values.append(pages[v_table[b, n], c, head])
        for r in range(min(k_new.shape[1], max(0, start[b] + i + 1))):
            keys.append(k_new[b, r, head])
            values.append(v_new[b, r, head])
        if keys:
            logits = np.stack(keys) @ q[b, i, h] / np.sqrt(dim)
            lse[b, i, h] = np.logaddexp.reduce(logits)
            out[b, i, h] = np.exp(logits - lse[b, i, h]) @ np.stack(values)
    return out, lse


def check(args: tuple[Any, ...], out: jax.Array, lse: jax.Array) -> None:
    """Two roundings to the dtype, of probabilities and of the result, each half an epsilon."""
    wanted, wanted_lse = expected(args)
    values = [np.abs(np.asarray(x, np.float64)) for x in (args[1], args[6])]
    largest = max(float(np.nanmax(np.append(x, 1.0))) for x in values)
    epsilon = max(float(jnp.finfo(out.dtype).eps), 1e-5)
    assert out.dtype == args[0].dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, rtol=0, atol=epsilon * largest)
    np.testing.assert_allclose(np.asarray(lse, np.float64), wanted_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(kernel: Callable[..., Any], name: str) -> None:
    args = arguments(CASES[name])
    check(args, *kernel("attend", *args))


NATIVE_CASES = CASES | {
    "dims that fill no vector": Case(dim=24, heads=6, chunk=16),
    "blocks of new tokens": Case(new=300, start=(299, 130), chunk=8, heads=14),
    "pages longer than a block": Case(chunk=160),
    "blocks that fill no vectors": Case(chunk=24, new=200, start=(190, 0)),
    "two queries": Case(queries=2, heads=2, dim=256),
    "no new tokens": FURTHER_CASES["no new tokens"],
    "nothing at all": FURTHER_CASES["nothing at all"],
    "one head of 128": FURTHER_CASES["no pages, one head of 128"],
}


@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("name", NATIVE_CASES)
@pytest.mark.parametrize("one", [True, False], ids=["one query", "more queries"])
def test_the_native_kernel_agrees_with_float64(level: str, name: str, one: bool) -> None:
    case = NATIVE_CASES[name]
    args = arguments(dataclasses.replace(case, queries=1) if one else case)
    patterns = jax.lax.bitcast_convert_type(args[1], jnp.uint16)
    beside = jnp.full((1, 40), -1, jnp.int32)  # empty pages behind
    alone = [x[1:] for x in args]
    for i in (2, 3, 4):
        alone[i] = jnp.concatenate([alone[i], beside], axis=1)
    run = jax.jit(partial(cpu.attend, target=CPU))
    with native_at(level):
        out, lse = run(*args)
        same, same_lse = run(alone[0], patterns, *alone[2:])
    check(args, out, lse)
    np.testing.assert_array_equal(same, out[1:])
    np.testing.assert_array_equal(same_lse, lse[1:])


@pytest.mark.parametrize("level", NATIVE)
def test_a_row_that_sees_no_more_stays_the_same_bit_for_bit(level: str) -> None:
    """Large logits, and many blocks behind, which only later queries of its vectors see."""
    case = Case(table=((3, 1),) * 1, lengths=((64, 64),), new=900, start=(0,), queries=900)
    q, *rest = arguments(case)
    q = q * 20
    run = jax.jit(partial(cpu.attend, target=CPU))
    with native_at(level):
        many, many_lse = run(q, *rest)
        few, few_lse = run(q[:, :2], *rest)
    np.testing.assert_array_equal(many[:, :2], few)
    np.testing.assert_array_equal(many_lse[:, :2], few_lse)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER_CASES)
def test_agrees_with_float64_further(
    kernel: Callable[..., Any], implementation: str, name: str
) -> None:
    args = arguments(FURTHER_CASES[name])
    if FURTHER_CASES[name].dtype == {"tpu": "float16", "mosaic_gpu": "float32"}.get(implementation):
        with pytest.raises(NotImplementedError, match=FURTHER_CASES[name].dtype):
            kernel("attend", *args)
        return
    check(args, *kernel("attend", *args))


def test_queries_in_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckv_jax.kernels_pallas.attend._LOGITS_BYTES", 1)  # blocks of 16
    args = arguments(Case(queries=37))
    check(args, *jax.jit(partial(reference))(*args))


def test_the_width_of_a_table_changes_no_bit() -> None:
    case = CASES["more pages than a piece"]
    q, pages, k_table, v_table, lengths, *new = arguments(case)
    empty = ((0, 0), (0, 30))
    wide = [jnp.pad(table, empty, constant_values=-1) for table in (k_table, v_table)]
    narrow = reference(q, pages, k_table, v_table, lengths, *new)
    padded = reference(q, pages, *wide, jnp.pad(lengths, empty), *new)
    for one, other in zip(narrow, padded, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_pool_of_bit_patterns() -> None:
    args = arguments(Case())
    pool = jax.lax.bitcast_convert_type(args[1], jnp.uint16)
    run = jax.jit(partial(attend, target=CPU))
    out, lse = run(*args)
    same, same_lse = run(args[0], pool, *args[2:])
    np.testing.assert_array_equal(out, same)
    np.testing.assert_array_equal(lse, same_lse)
    for name in ("mosaic_gpu", "tpu"):
        with pytest.raises(NotImplementedError, match="uint16"):
            attend(args[0], pool, *args[2:], target=OF[name], implementation=name)


def test_merge_of_parts_is_the_whole() -> None:
    args = arguments(Case(dtype="float32"))
    q, pages, k_table, v_table, lengths, k_new, v_new, start = args
    run = jax.jit(partial(attend, target=CPU))
    outs, lses = [], []
    for part in ((0, 2), (2, 4), (4, 5)):
        at = slice(*part)
        entries = (k_table[:, at], v_table[:, at], lengths[:, at])
        nowhere = start if part == (0, 2) else jnp.full_like(start, -99)
        out, lse = run(q, pages, *entries, k_new, v_new, nowhere)
        outs.append(out)
        lses.append(lse)
    check(args, *merge(outs, lses))
    nothing = jnp.full_like(lses[0], -jnp.inf)
    out, lse = merge([jnp.zeros_like(outs[0])] * 2, [nothing] * 2)
    assert not np.any(out)
    assert np.all(np.isneginf(lse))
    with pytest.raises(ValueError, match="1 outs and 2 lses"):
        merge(outs[:1], lses[:2])


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (0, jnp.zeros((2, 9, 3, 64), jnp.bfloat16), "K | H"),
        (2, jnp.zeros((2, 4), jnp.int32), "got v_table|got lengths"),
        (4, jnp.zeros((2, 5)), "got lengths float32"),
        (5, jnp.zeros((2, 12, 128)), "got k_new float32"),
        (6, jnp.zeros((2, 11, 128), jnp.bfloat16), "got k_new"),
        (7, jnp.zeros(3, jnp.int32), "got q_start"),
    ],
)
def test_says_what_it_got(index: int, wrong: jax.Array, message: str) -> None:
    args = list(arguments(Case()))
    args[index] = wrong
    with pytest.raises(ValueError, match=message):
        attend(*args, target=CPU)
