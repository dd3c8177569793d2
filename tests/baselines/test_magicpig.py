"""MagicPIG: samples are weighed so that their sum is full attention's on average."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_support import small_engine
from numpy_qwen import softmax

from ckv_jax.baselines.decoding import ENDS, Selected, Setting
from ckv_jax.baselines.magicpig import hashes, log_chance, sampled, sampling, tables_of
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.systems import SYSTEMS


def test_how_often_hashes_are_shared_is_what_is_divided_by() -> None:
    bits, tables, draws = 3, 6, 4000
    rng = np.random.default_rng(0)
    for cosine in (0.9, 0.4, -0.2):
        pair = np.array([[1, 0], [cosine, math.sqrt(1 - cosine**2)]], np.float32)
        planes = rng.normal(size=(2, draws * tables * bits)).astype(np.float32)
        codes = np.asarray(hashes(jnp.asarray(pair), jnp.asarray(planes), draws * tables))
        shared = (codes[0] == codes[1]).reshape(draws, tables).sum(axis=1) >= 2
        chance = math.exp(float(log_chance(jnp.float32(cosine), bits, tables)))
        assert abs(shared.mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / draws)


def test_small_chances_are_none_of_rounding() -> None:
    a = (1 - math.acos(-0.6) / math.pi) ** 10
    expected = 1 - (1 - a) ** 150 - 150 * a * (1 - a) ** 149
    assert float(log_chance(jnp.float32(-0.6), 10, 150)) == pytest.approx(
        math.log(expected), abs=1e-3
    )


def attended(
    *layers: int, bits: int = 10, tables: int = 20, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """What rows attend to outside of chunk 0 [layers, B, H, D], and all that chunk 0 leaves."""
    rng = np.random.default_rng(1)
    chunks, size, heads, group, dim, count = 4, 8, 2, 3, 16, 29
    kv = rng.normal(size=(2, chunks, size, heads, dim)).astype(np.float32)
    kv[:, -1, count % size :] = 0
    q = scale * rng.normal(size=(2, 1, heads * group, dim)).astype(np.float32)
    layout = SimpleNamespace(numpy_dtype=np.dtype(np.float32))
    prefix = SimpleNamespace(num_tokens=count, layout=layout)
    opened, config = cast("Any", SimpleNamespace(prefix=prefix, probe_chunks=6)), cast("Any", None)
    selected = Selected(
        jnp.asarray(q), cast("Any", None), jnp.int32(count), jnp.int32(chunks),
        jnp.ones(2, jnp.int32), jnp.zeros((2, 1, 6)), jnp.array([[[0, -1]], [[-1, 0]]], jnp.int32),
    )  # fmt: skip
    setting = Setting(config, ENDS, size, Target.here())
    attend = jax.jit(lambda index: sampled(selected, index, setting, bits=bits).out[:, 0])
    of = partial(tables_of, config, opened, bits=bits, tables=tables, dense=(16,))
    found = [np.asarray(attend(of(layer, *kv))) for layer in layers]
    keys, values = (np.repeat(kind.reshape(-1, heads, dim)[size:count], group, 1) for kind in kv)
    weights = softmax(np.einsum("bhd,thd->bht", q[:, 0], keys) / math.sqrt(dim))
    return np.stack(found), np.einsum("bht,thd->bhd", weights, values)


def test_where_every_token_is_sampled_it_is_full_attention() -> None:
    for bits, layer in ((0, 1), (10, 16)):
        [found], expected = attended(layer, bits=bits)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_samples_stand_for_those_that_are_left_out() -> None:
    """The mean over many draws of tables, of queries that weigh all tokens almost alike."""
    found, expected = attended(*range(20, 220), bits=2, tables=4, scale=0.3)
    off = np.abs(found.mean(axis=0) - expected).max()
    assert off < 0.15 * np.abs(expected).max() + 0.05
    assert np.abs(found[0] - expected).max() > 2 * off, "one draw is further away"


@pytest.mark.parametrize("given", [{"bits": 17}, {"bits": -1}, {"tables": 1}], ids=str)
def test_what_no_table_can_be_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at most 16 bits and 2 or more tables"):
        sampling(**given)


@pytest.mark.parametrize("name", ["magicpig", "kvswap"])
@pytest.mark.parametrize("given", [{"codec": "int8"}, {"pack_layers": 2, "period": 2}], ids=str)
def test_packs_of_which_no_index_is_made_are_refused(
    tmp_path: Path, name: str, given: dict[str, Any]
) -> None:
    """When an engine is made, before anything is stored."""
    system = dataclasses.replace(SYSTEMS[name], **given, subperiod=given.get("period", 1))
    with pytest.raises(ValueError, match="without a codec: an index is made of them"):
        small_engine(tmp_path, system=system, dtype="bfloat16")
