"""A coarse pass and what it leaves, against Equation 1 in numpy, and through an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_sharp import Sharp
from engine_support import TIGHT, scale_error, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_qwen import softmax

from ckv_jax import Request
from ckv_jax.kernels_pallas.score.probe import (
    BoundKeys,
    Int4Keys,
    Keys,
    MeanKeys,
    PqKeys,
    Probe,
    as_heads,
)
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.selection.base import Rule, Scored, scored, select_units
from ckv_jax.selection.select import Coarse, Ends, Select, Stages

C, K, G, D, M, LAYERS = 4, 2, 3, 8, 64, 3
T = C * M - 3  # the last chunk is short
CPU = Target(platform="cpu")


def keys_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(LAYERS, C * M, K, D)).astype(np.float32) * 2


def queries_of(batch: int, seed: int = 9, length: int = 4) -> np.ndarray:
    shape = (LAYERS, batch, length, K * G, D)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stages_of(coarse: Coarse, limits: list[int]) -> Stages | None:
    return coarse.stages(np.array(limits, np.int32), M)


@partial(jax.jit, static_argnames=("stages", "peaks", "target"))
def jitted(
    queries: list[np.ndarray], probes: list[Probe], limits: np.ndarray, lengths: np.ndarray,
    before: np.ndarray | None, *, stages: Stages | None, peaks: bool = False, target: Target = CPU,
) -> Scored:  # fmt: skip
    """As an engine calls it, in one program."""
    return scored(
        queries, [probes], Rule(n=M, chunk_tokens=C, stages=stages, peaks=peaks),
        num_tokens=jnp.full(1, T, jnp.int32), num_chunks=jnp.full(1, M, jnp.int32),
        q_lengths=lengths, limits=limits, target=target, whole=lambda x: x, before=before,
    )  # fmt: skip


def run(
    coarse: Coarse | None, limits: list[int], lengths: list[int], *,
    probes: list[Probe] | None = None, queries: np.ndarray | None = None,
    before: np.ndarray | None = None,
) -> Scored:  # fmt: skip
    asked = queries_of(len(limits)) if queries is None else queries
    found = jitted(
        list(asked), probes or list(map(Keys, keys_of(0))), np.array(limits, np.int32),
        np.array(lengths, np.int32), before, stages=coarse and stages_of(coarse, limits),
    )  # fmt: skip
    return jax.tree.map(np.asarray, found)


def by_chunk(q: np.ndarray, keys: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Equation 1 over the keys of some chunks, [K, M] of queries [n, H, D]: 0 elsewhere."""
    out = np.zeros((K, M))
    seen = np.isin(np.arange(C * M) // C, chunks) & (np.arange(C * M) < T)
    for head in range(K * G):
        logits = q[:, head].astype(np.float64) @ keys[:, head // G].T.astype(np.float64) / D**0.5
        weights = softmax(np.where(seen, logits, -np.inf)).sum(0)
        out[head // G] += weights.reshape(M, C).sum(1)
    return out


def two_stages(
    coarse: Coarse, limit: int, q: np.ndarray, before: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Scores [M] and the chunks left, of one row's queries [L, n, H, D]."""
    keys, every = keys_of(0), np.arange(M)
    middle = LAYERS // 2
    rough = by_chunk(q[middle, -1:], keys[middle], every) * q.shape[1] * LAYERS
    count = min(max(limit * coarse.survivors, coarse.least), M // 4)
    left = np.sort(np.argsort(-(rough.sum(0) + before), kind="stable")[:count])
    fine = sum(by_chunk(q[i], keys[i], left) for i in range(LAYERS))
    share = rough[:, left].sum(1) / rough.sum(1)
    scores = rough.sum(0)
    scores[left] = (fine * share[:, None]).sum(0)[left]
    return scores, left


@pytest.mark.parametrize(
    "coarse", [Coarse(survivors=4), Coarse(survivors=2, least=5), Coarse(survivors=5)]
)
def test_rows_of_a_batch_are_scored_as_equation_1_says_of_what_is_left(coarse: Coarse) -> None:
    limits, lengths = [2, 3, 0, 1], [4, 1, 0, 3]
    asked = queries_of(4)
    found = run(coarse, limits, lengths)
    assert found.left is not None
    for row in (0, 1, 3):
        q = asked[:, row, : lengths[row]]
        scores, left = two_stages(coarse, limits[row], q)
        assert np.flatnonzero(found.left[row]).tolist() == left.tolist()
        np.testing.assert_allclose(found.scores[row], scores, rtol=2e-4, atol=1e-5)
        # Nothing of Equation 1's whole is lost: shares of it are of all attention.
        total = lengths[row] * LAYERS * K * G
        np.testing.assert_allclose(found.scores[row].sum(), total, rtol=1e-4)
    assert not found.left[2].any() and not found.scores[2].any()


def peaks_by_chunk(q: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sums over queries [n, H, D] and heads of weighed masses [M], and of their squares."""
    mass, peaks, real = np.zeros(M), np.zeros(M), np.arange(C * M) < T
    for distance, query in enumerate(q[::-1].astype(np.float64)):
        for head in range(K * G):
            logits = np.where(real, keys[:, head // G] @ query[head] / D**0.5, -np.inf)
            of_head = softmax(logits).reshape(M, C).sum(1) / (1 + distance)
            mass += of_head
            peaks += of_head**2
    return mass, peaks


def test_peaks_rank_chunks_and_masses_are_covered() -> None:
    lengths, asked = [4, 2], queries_of(2)
    found = jitted(
        list(asked), list(map(Keys, keys_of(0))), np.array([3, 3], np.int32),
        np.array(lengths, np.int32), None, stages=None, peaks=True,
    )  # fmt: skip
    masses = []
    for row, length in enumerate(lengths):
        both = [peaks_by_chunk(asked[i, row, :length], keys_of(0)[i]) for i in range(LAYERS)]
        mass, peaks = np.sum(both, axis=0)
        np.testing.assert_allclose(found.mass[row], mass, rtol=2e-4, atol=1e-5)
        np.testing.assert_allclose(found.scores[row], peaks, rtol=2e-4, atol=1e-5)
        masses.append(mass)
    selected = select_units(found.scores, 3, jnp.asarray([3, 3]), mass=found.mass)
    for row in range(2):
        best = np.argsort(-np.asarray(found.scores[row]), kind="stable")[:3]
        assert np.asarray(selected.ids[row]).tolist() == sorted(best.tolist())
        share = masses[row][best].sum() / masses[row].sum()
        np.testing.assert_allclose(selected.mass[row], share, rtol=1e-4)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 2**20))
@settings(max_examples=6, deadline=None)
def test_rows_that_keep_too_much_are_scored_in_one_stage_bit_for_bit(
    limits: list[int], seed: int
) -> None:
    """Whether a row is depends on itself alone, whatever rows stand beside it."""
    coarse = Coarse(survivors=4)
    queries = queries_of(len(limits), seed)
    lengths = [4] * len(limits)
    plain = run(None, limits, lengths, queries=queries)
    found = run(coarse, limits, lengths, queries=queries)
    assert plain.left is None
    for row, limit in enumerate(limits):
        if 4 * 4 * limit > M:
            assert found.left is None or found.left[row].all()
            assert (found.scores[row] == plain.scores[row]).all()
        else:
            assert found.left is not None and int(found.left[row].sum()) == 4 * limit
    for survivors in (64, 1024):  # every chunk survives
        assert run(Coarse(survivors=survivors), limits, lengths, queries=queries).left is None


@pytest.mark.parametrize("last", [2, 5], ids=["two stages", "a row in one stage"])
def test_prefixes_together_are_scored_as_each_alone(last: int) -> None:
    """Three prefixes of other lengths, two rows each; those of the second one do not select now."""
    tokens, limits = np.array([T, T - 40, T - 100], np.int32), np.array([2, 3, 1, 2, 2, last])
    coarse = Coarse(survivors=4)
    rule = Rule(
        n=M, chunk_tokens=C, stages=Stages(coarse, 16, last > 2), peaks=True, always=Ends(C, C)
    )
    probes = [list(map(Keys, keys_of(seed))) for seed in range(3)]
    queries, lengths = list(queries_of(6)), np.array([4, 1, 2, 2, 3, 4], np.int32)
    before = np.random.default_rng(5).random((6, M)).astype(np.float32)

    @partial(jax.jit, static_argnames="which")
    def of(which: tuple[int, ...], now: np.ndarray | None) -> Scored:
        rows = np.concatenate([[2 * prefix, 2 * prefix + 1] for prefix in which])
        count = tokens[list(which)]
        return scored(
            [q[rows] for q in queries], [probes[prefix] for prefix in which], rule,
            num_tokens=jnp.asarray(count), num_chunks=jnp.asarray(-(-count // C)),
            q_lengths=lengths[rows], limits=limits[rows].astype(np.int32), target=CPU,
            whole=lambda x: x, now=now, before=before[rows],
        )  # fmt: skip

    together = of((0, 1, 2), np.array([True, False, True]))
    assert not together.scores[2:4].any()
    for prefix in (0, 2):
        alone, mine = of((prefix,), None), slice(2 * prefix, 2 * prefix + 2)
        assert alone.left is not None and together.left is not None
        np.testing.assert_array_equal(together.left[mine], alone.left)
        assert alone.left.any(axis=1).all()
        for both in zip(together[::2], alone[::2], strict=True):
            np.testing.assert_allclose(both[0][mine], both[1], rtol=1e-5, atol=1e-6)


def _int4(rng: np.random.Generator) -> Probe:
    codes = rng.integers(0, 256, (C * M, K, D // 2), dtype=np.uint8)
    scale = rng.uniform(0.2, 0.4, (C * M, K)).astype(np.float32)
    return Int4Keys(codes, scale)


def _pq(rng: np.random.Generator) -> Probe:
    codes = rng.integers(0, 256, (C * M, K, 1), dtype=np.uint8)
    books = rng.normal(size=(K, 1, 256, D)).astype(np.float32)
    return PqKeys(codes, books)


def _means(rng: np.random.Generator) -> Probe:
    mean = rng.normal(size=(M, K, D)).astype(np.float32)
    return MeanKeys(mean, np.zeros((M, K), np.float32))


def _bounds(rng: np.random.Generator) -> Probe:
    low = rng.normal(size=(M, K, D)).astype(np.float32)
    return BoundKeys(low, low + 1)


@pytest.mark.parametrize("make", [_int4, _pq, _means, _bounds])
def test_of_every_probe_the_best_of_what_is_left_are_selected(
    make: Callable[[np.random.Generator], Probe],
) -> None:
    """Layers and queries are alike, so that what the coarse pass finds best is what is best."""
    probes = [make(np.random.default_rng(0))] * LAYERS
    queries = np.repeat(queries_of(2, length=1)[:1], LAYERS, axis=0)
    limits, lengths = [2, 4], [1, 1]
    plain = run(None, limits, lengths, probes=probes, queries=queries)
    found = run(Coarse(survivors=4), limits, lengths, probes=probes, queries=queries)
    n = jnp.asarray(np.array(limits, np.int32))
    ids = [select_units(x.scores, 4, n, among=x.left).ids for x in (plain, found)]
    assert np.intersect1d(*map(np.asarray, ids)).size > 3  # shares of fewer heads weigh otherwise
    outside = ~found.left
    np.testing.assert_allclose(found.scores[outside], plain.scores[outside], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.scores.sum(1), plain.scores.sum(1), rtol=1e-4)


@pytest.mark.parametrize("peaks", [False, True])
@pytest.mark.parametrize("coarse", [None, Coarse(survivors=4)])
def test_a_gpu_scores_the_digests_of_all_layers_as_those_of_one(
    coarse: Coarse | None, peaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no GPU is, the reference scores: all chunks, and the few that a coarse pass leaves."""
    limits = [2, 4]
    given = (
        list(queries_of(2)), [_int4(np.random.default_rng(layer)) for layer in range(LAYERS)],
        np.array(limits, np.int32), np.array([4, 3], np.int32), None,
    )  # fmt: skip
    stages = coarse and stages_of(coarse, limits)
    heads, found = [list[int](), list[int]()], []
    for joins in (True, False):

        def way(probes: Sequence[Probe], joins: bool = joins) -> Int4Keys | None:
            one = as_heads(probes) if joins else None
            heads[joins].append(K if one is None else one.shape[1])
            return one

        monkeypatch.setattr("ckv_jax.selection.base.as_heads", way)
        traced_anew = partial(jitted.__wrapped__)
        score = jax.jit(traced_anew, static_argnames=("stages", "peaks", "target"))
        found.append(score(*given, stages=stages, peaks=peaks, target=Target(platform="gpu")))
    assert [{*some} for some in heads] == [{K}, {LAYERS * K}]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_digests_that_a_gpu_does_not_score_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    shorter = Int4Keys(*(array[C:] for array in (_int4(rng).codes, _int4(rng).scale)))
    for probes in ([_int4(rng), _means(rng)], [_int4(rng), shorter], [_means(rng)] * 2):
        assert as_heads(probes) is None
    two = [_int4(rng), _int4(rng)]
    assert as_heads(two) is not None
    monkeypatch.setattr("ckv_jax.kernels_pallas.score.probe._JOINED_BYTES", C * M * K * D - 1)
    assert as_heads(two) is None


def test_bad_values_are_named() -> None:
    for bad in (
        {"survivors": 0}, {"survivors": 1025}, {"least": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            Coarse(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="coarse"):
        Select(coarse=Coarse(), score=lambda *_, **__: None)  # type: ignore[arg-type]


BUDGET, LENGTH = 0.1, 12
"""Of 16 chunks two, four of which are left."""
TWO = Select(score_layers=3, queries=4, coarse=Coarse(survivors=2))


def requests(prefix: object) -> list[Request]:
    return [Request(prefix=prefix, suffix=tokens(5 + i, i), budget=BUDGET) for i in range(3)]  # type: ignore[arg-type]


def test_an_engine_selects_in_two_stages_alone_and_in_batches(sharp: Sharp, tmp_path: Path) -> None:
    everything = dataclasses.replace(TWO, coarse=Coarse(survivors=1024))
    with sharp.fresh(tmp_path) as one, sharp.fresh(tmp_path, system={"reprefill": TWO}) as two:
        prefix = one.ingest(tokens(250))
        plain, coarse = (engine.reprefill(requests(prefix)) for engine in (one, two))
        for result in coarse:
            assert result.trace.chunks == plain[0].trace.chunks  # as many, of as many
            assert 0.05 < result.trace.attention_mass <= 1
        for request, together in zip(requests(prefix), coarse, strict=True):
            (alone,) = two.reprefill([request])
            assert scale_error(alone.logits, together.logits) < TIGHT
        others = [scale_error(a.logits, b.logits) for a, b in zip(plain, coarse, strict=True)]
        assert max(others) > 100 * TIGHT
        with sharp.fresh(tmp_path, system={"reprefill": everything}) as all_left:
            again = all_left.reprefill(requests(prefix))
    for mine, theirs in zip(plain, again, strict=True):
        assert (mine.logits == theirs.logits).all()
