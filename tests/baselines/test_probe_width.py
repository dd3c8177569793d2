"""IMPRESS's probe: the keys of three query heads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_support import SMALL, scale_error, small_engine, tokens

from ckv_jax import Request
from ckv_jax.baselines.h2o import column_sums
from ckv_jax.baselines.impress import Impress, _by_probe
from ckv_jax.config import layout_of
from ckv_jax.model.config import PUBLISHED
from ckv_jax.systems import SYSTEMS

MODEL = dataclasses.replace(SMALL, num_layers=3, num_heads=8, num_kv_heads=4)
LENGTH = 250


def test_three_heads_of_a_grouped_model_need_one_key_head() -> None:
    seven = PUBLISHED["7B"]  # 28 query heads, 4 KV heads
    alike = dataclasses.replace(seven, num_kv_heads=28)
    widths = [
        layout_of(SYSTEMS["impress"], model, "bfloat16").probe_heads for model in (seven, alike)
    ]
    assert widths == [1, 3]


@pytest.mark.parametrize(("heads", "width"), [(3, 2), (5, 3)])
def test_bytes_of_the_probe_and_the_answer(tmp_path: Path, heads: int, width: int) -> None:
    system = dataclasses.replace(SYSTEMS["impress"], own=Impress(heads=heads).own())
    cold = {"device_cache_bytes": 0, "host_cache_bytes": 0}
    with small_engine(tmp_path, system=system, model=MODEL, **cold) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        request = Request(prefix=prefix, suffix=tokens(9, 1), budget=1.0)
        [result] = engine.reprefill([request])
        packs = sum(s.args["bytes"] for s in result.trace.spans if s.name == "pack_read")
        row = MODEL.head_dim * engine.layout.numpy_dtype.itemsize
        assert result.trace.bytes["ssd"] - packs == MODEL.num_layers * LENGTH * width * row
        assert scale_error(result.logits, engine.recompute(request).logits) < 1e-4


def test_each_query_head_votes_by_itself() -> None:
    rng = np.random.default_rng(3)
    size, dim, group, n = 40, 8, 4, 5
    q = rng.normal(size=(1, 6, 2 * group, dim)).astype(np.float32) * 4
    k = rng.normal(size=(1, 6, 2, dim)).astype(np.float32)
    probe = rng.normal(size=(size, 1, dim)).astype(np.float32)
    lengths, limits = np.array([6], np.int32), np.array([n], np.int32)
    by_probe = jax.jit(_by_probe, static_argnames=("n", "heads", "chunk_tokens"))
    ids, _, _, agreement, _ = by_probe(
        (q, k, k), lengths, probe, np.int32(size), limits, n=n, heads=3, chunk_tokens=8
    )
    sets = []
    for head in range(3):
        one = (q[0, :, head : head + 1], probe, k[0, :, :1])
        sums = jax.jit(column_sums)(*one, np.ones(size, bool), np.int32(6))
        sets.append(set(np.argsort(-np.asarray(sums[0]), kind="stable")[:n].tolist()))
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = np.mean([len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a, b in pairs])
    assert float(agreement[0]) == pytest.approx(expected) and expected < 1
    twice = {t for a, b in pairs for t in sets[a] & sets[b]}
    assert twice <= set(np.asarray(ids[0]).tolist())
