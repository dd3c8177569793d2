"""`Select` says how questions and texts select; what is stored depends on its layers alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.kernels_pallas.score.probe import BoundKeys, Keys, MeanKeys
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.prefix.open_prefixes import device_digest
from ckv_jax.selection.base import Share, before_others, float_keys, select_units
from ckv_jax.selection.select import NOTHING, Coarse, Ends, Select
from ckv_jax.storage.digest import DigestData
from ckv_jax.storage.layout import Layout
from ckv_jax.systems import SYSTEMS
from tests.support.truth import digest_keys

STORED = {
    "recompute": "3f35ba27", "as-lru": "d6a9cdfa", "as-h2o-lru": "d6a9cdfa",
    "as-h2o-lfu": "d6a9cdfa", "impress": "307fb8eb", "contiguous-kv": "1667e91a",
    "ckv": "c152c980", "cake": "c152c980", "ckv-fast": "c152c980", "ckv-16": "f4e2a4d8",
    "dense": "468bf215",
    "flexgen": "c3ca4f0c", "quest": "b9ab7383",
    "shadowkv": "47afe08e", "retroinfer": "0858f011", "infinigen": "077d2858",
    "pqcache": "84dc3b15", "kvdrive": "0858f011", "kvswap": "2f6c0063",
    "solidattention": "252b0857", "magicpig": "c3ca4f0c",
}  # fmt: skip
"""The first digits of layouts, as stores have them that were written with flat fields; those of
quest, shadowkv, retroinfer and kvdrive since their heads are apart, that of shadowkv since it has
outliers, that of pqcache since its keys are two halves of 6 bits each."""
MODEL = {"num_layers": 10, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "bfloat16"}


def test_stages_and_peaks_are_nothing_that_is_stored() -> None:
    ours = SYSTEMS["ckv"]
    for changed in ({"coarse": Coarse()}, {"peaks": False}):
        other = dataclasses.replace(ours, reprefill=dataclasses.replace(ours.reprefill, **changed))
        assert other.reprefill != ours.reprefill and other.layout(**MODEL) == ours.layout(**MODEL)


def test_stores_of_every_preset_still_open() -> None:
    layouts = {name: system.layout(**MODEL) for name, system in SYSTEMS.items()}
    filled = {name: dataclasses.replace(one, short_last=False) for name, one in layouts.items()}
    assert {name: one.hex[:8] for name, one in filled.items()} == STORED
    assert {one.pack_layers for name, one in layouts.items() if one != filled[name]} == {4}


@pytest.mark.parametrize(
    ("name", "select", "why"),
    [
        ("reprefill", {"queries": 0}, "queries=0"),
        ("reprefill", {"queries": 1.5}, "queries=1.5"),
        ("reprefill", {"score_layers": 0}, "score_layers=0"),
        ("decode", {"queries": None}, "queries=None"),
        ("decode", {"queries": 65}, "queries=65"),
    ],
)
def test_what_nothing_can_be_selected_by_is_refused(
    name: str, select: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(SYSTEMS["ckv"], **{name: Select(**select)})  # type: ignore[arg-type]


# -- the one top-k: best first within the limit, in order of position, ties to the earlier ---------


@pytest.mark.parametrize("target", [None, Target(platform="cpu")], ids=["XLA", "CPU"])
def test_the_best_in_order_up_to_each_rows_limit(target: Target | None) -> None:
    scores = np.random.default_rng(0).random((3, 50)).astype(np.float32)
    limits = np.array([7, 3, 0], np.int32)
    found = select_units(
        jnp.asarray(scores), 7, jnp.asarray(limits), count=jnp.int32(40), target=target
    )
    for row, limit in enumerate(limits.tolist()):
        best = np.sort(np.argsort(-scores[row, :40], kind="stable")[:limit])
        ids = np.asarray(found.ids)[row]
        assert ids.tolist() == best.tolist() + [-1] * (7 - limit)
        held = scores[row, best]
        np.testing.assert_allclose(np.asarray(found.attention)[row, :limit], held)
        assert not np.asarray(found.attention)[row, limit:].any()
        mass = held.sum() / scores[row].sum()
        np.testing.assert_allclose(np.asarray(found.mass)[row], mass, rtol=1e-6)
    assert np.asarray(found.ids).dtype == np.int32


@pytest.mark.parametrize("target", [None, Target(platform="cpu")], ids=["XLA", "CPU"])
@pytest.mark.parametrize(
    ("n", "count", "wanted"),
    [
        (3, 2, [0, 1, -1]),
        (6, 4, [0, 1, 2, 3, -1, -1]),
        (2, 0, [-1, -1]),
        (0, 4, []),
        (2, 4, [0, 1]),
    ],
)
def test_rows_are_padded_and_ties_go_to_the_earlier(
    n: int, count: int, wanted: list[int], target: Target | None
) -> None:
    limits, scores = jnp.full((1,), n, jnp.int32), jnp.full((1, 4), 0.5)
    found = select_units(scores, n, limits, count=jnp.int32(count), target=target)
    assert np.asarray(found.ids)[0].tolist() == wanted


def test_what_may_not_be_selected_holds_nothing_of_a_share() -> None:
    """Of four chunks of a prefix, and two that are none."""
    scores = jnp.asarray([[4.0, 3.0, 2.0, 1.0, 99.0, 99.0]], jnp.float32)
    share = Share(np.array([0.41], np.float32), np.array([1], np.int32))
    for count, of in ((jnp.int32(4), scores), (None, scores.at[0, 4:].set(-jnp.inf))):
        found = select_units(of, 6, jnp.full(1, 6, jnp.int32), count=count, share=share)
        assert np.asarray(found.ids)[0].tolist() == [0, 1, -1, -1, -1, -1]


def test_a_share_is_of_the_mass_where_scores_rank_by_something_else() -> None:
    scores = jnp.asarray([[4.0, 3.0, 2.0, 1.0]], jnp.float32)
    mass = jnp.asarray([[1.0, 2.0, 3.0, 4.0]], jnp.float32)
    limit = jnp.full(1, 4, jnp.int32)
    for asked, wanted in ((0.09, [0]), (0.11, [0, 1]), (0.31, [0, 1, 2])):
        share = Share(np.array([asked], np.float32), np.array([1], np.int32))
        found = select_units(scores, 4, limit, share=share, mass=mass)
        assert np.asarray(found.ids)[0].tolist() == wanted + [-1] * (4 - len(wanted))
        np.testing.assert_allclose(found.mass, [sum(range(1, len(wanted) + 1)) / 10], rtol=1e-6)
    np.testing.assert_array_equal(found.scores, mass)


# -- what is always selected -----------------------------------------------------------------------


NONE = -np.inf


def ends_of(ends: Ends, rows: int, chunks: int, tokens: object) -> np.ndarray:
    scores, limits = jnp.zeros((rows, chunks)), jnp.zeros(rows, jnp.int32)
    return np.asarray(ends.chunks(scores, (), jnp.asarray(tokens), limits, limits, 8))


def test_both_ends_of_a_prefix() -> None:
    """Every chunk that holds one of them, of each row's own length."""
    found = ends_of(Ends(), 4, 20, [160, 153, 8, 79])
    for row, tokens in zip(found, (160, 153, 8, 79), strict=True):
        wanted = {i // 8 for i in range(tokens) if i < 16 or i >= tokens - 64}
        if tokens < 16:
            wanted |= {0, 1}  # also a chunk that is not there, which no selection takes
        assert set(np.flatnonzero(row).tolist()) == wanted
    assert ends_of(Ends(), 2, 12, 90).sum(axis=1).tolist() == [11, 11]
    assert np.flatnonzero(ends_of(Ends(4, 8), 1, 12, 90)).tolist() == [0, 10, 11]


def test_what_is_always_selected_comes_before_all_others_where_it_may_be_selected() -> None:
    scores = jnp.asarray([[1.0, 9.0, NONE, 3.0], [4.0, 2.0, 1.0, 3.0]], jnp.float32)
    always = jnp.asarray([[1, 0, 1, 0], [0, 0, 1, 0]], bool)
    ranked = np.asarray(before_others(scores, always))
    np.testing.assert_array_equal(ranked, [[np.inf, 9, NONE, 3], [4, 2, np.inf, 3]])
    assert before_others(scores, None) is scores
    found = select_units(scores, 2, jnp.asarray([2, 2], jnp.int32), always=always)
    np.testing.assert_array_equal(found.ids, [[0, 1], [0, 2]])
    np.testing.assert_array_equal(found.attention, [[1, 9], [4, 1]])  # their own scores
    np.testing.assert_allclose(found.mass, [9 / 12, 4 / 9])  # of what is not always selected
    whole = select_units(scores[1:], 2, jnp.asarray([2]), always=jnp.ones((1, 4), bool))
    assert np.asarray(whole.mass).tolist() == [1.0]


def test_what_is_always_selected_is_selected_though_a_share_is_held_without_it() -> None:
    scores = jnp.asarray([[9.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 9.0]], jnp.float32)
    always = jnp.asarray([[0, 0, 1, 1], [1, 1, 0, 0]], bool)
    share = Share(np.full(2, 0.01, np.float32), np.zeros(2, np.int32))
    found = select_units(scores, 4, jnp.full(2, 4, jnp.int32), share=share, always=always)
    np.testing.assert_array_equal(found.ids, [[0, 2, 3, -1], [0, 1, 3, -1]])


def test_a_share_is_of_what_is_not_always_selected() -> None:
    """A first chunk with most of the attention fills no share, and the rest has the same one."""
    scores = jnp.asarray([[90.0, 4.0, 3.0, 2.0, 1.0]], jnp.float32)
    always, limit = jnp.asarray([[1, 0, 0, 0, 0]], bool), jnp.full(1, 5, jnp.int32)

    def chosen(asked: float, least: int, scores: jax.Array = scores) -> tuple[list[int], float]:
        share = Share(np.full(1, asked, np.float32), np.full(1, least, np.int32))
        found = select_units(scores, 5, limit, share=share, always=always)
        ids = np.asarray(found.ids)[0]
        return ids[ids >= 0].tolist(), float(found.mass[0])

    for asked, wanted in ((0.39, [0, 1]), (0.69, [0, 1, 2]), (0.71, [0, 1, 2, 3])):
        ids, held = chosen(asked, 1)
        assert ids == wanted and held >= asked
    assert chosen(0.1, 3)[0] == [0, 1, 2]  # the least counts what is always selected
    assert chosen(1.0, 1)[0] == [0, 1, 2, 3, 4]
    alone = jnp.asarray([[1.0, 0.0, 0.0, 0.0, 0.0]], jnp.float32)  # nothing else has any
    assert chosen(0.9, 1, alone) == ([0], 1.0) and chosen(0.9, 3, alone)[0] == [0, 1, 2]


def test_counts_are_those_of_the_chunks_that_are_taken() -> None:
    layout = Layout(num_layers=2, num_kv_heads=2, head_dim=8, chunk_tokens=8)
    for tokens in (1, 8, 15, 64, 79, 80, 81, 153, 160):
        for ends in (Ends(), Ends(4, 64), Ends(4, 8), Ends(1, 1)):
            chunks = layout.num_chunks(tokens)
            taken = int(ends_of(ends, 1, chunks, tokens).sum())
            assert taken <= ends.most(layout, tokens) <= chunks
            if tokens > 80:
                assert taken == ends.most(layout, tokens)
    assert NOTHING.most(layout, 4096) == 0


@pytest.mark.parametrize("wrong", [(0, 64), (16, 0), (1.5, 64)])
def test_what_cannot_be_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Ends(*wrong)


# -- keys of any probe as floats -------------------------------------------------------------------


TOKENS, HEADS, DIM, CHUNK = 24, 2, 16, 8
RNG = np.random.default_rng(0)


def digest(kind: str) -> DigestData:
    """One layer's digest of random codes."""
    width = {"int4": DIM // 2, "pq": DIM // 8}[kind]
    codes = RNG.integers(0, 256, (1, TOKENS, HEADS, width)).astype(np.uint8)
    if kind == "pq":
        books = RNG.normal(size=(1, HEADS, width, 256, 8)).astype(np.float32)
        return DigestData(kind, {"codes": codes, "codebooks": books})
    scale = RNG.uniform(0.1, 1.0, (1, TOKENS, HEADS)).astype(np.float32)
    return DigestData(kind, {"codes": codes, "scale": scale})


def decoded(probe: object, dtype: str = "float32") -> np.ndarray:
    return np.asarray(jax.jit(lambda probe: float_keys(probe, dtype))(probe))


@pytest.mark.parametrize("kind", ["int4", "pq"])
def test_digests_are_decoded_as_the_store_does(kind: str) -> None:
    data = digest(kind)
    (probe,) = device_digest(data, TOKENS // CHUNK, CHUNK)
    found = decoded(probe)
    assert found.dtype == np.float32 and found.shape == probe.shape
    np.testing.assert_allclose(found, digest_keys(data)[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exact_keys_may_be_bit_patterns(dtype: str) -> None:
    keys = jnp.asarray(RNG.normal(size=(TOKENS, HEADS, DIM)), dtype)
    np.testing.assert_array_equal(decoded(Keys(keys), dtype), np.asarray(keys, np.float32))
    if dtype != "float32":
        bits = jax.lax.bitcast_convert_type(keys, jnp.uint16)
        np.testing.assert_array_equal(decoded(Keys(bits), dtype), np.asarray(keys, np.float32))


def test_landmarks_are_refused() -> None:
    mean = jnp.zeros((3, HEADS, DIM))
    for probe in (MeanKeys(mean, jnp.zeros((3, HEADS))), BoundKeys(mean, mean)):
        with pytest.raises(TypeError, match="one entry per chunk, expected one key per token"):
            float_keys(probe, "float32")
