"""What a prefix's view holds on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_support import small_engine, tokens

from ckv_jax import Engine, Prefix, Request
from ckv_jax.kernels_pallas.score.probe import BoundKeys, Int4Keys, MeanKeys
from ckv_jax.prefix import open_prefixes
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.selection.select import Select


@pytest.mark.parametrize("kind", ["int4", "means", "bounds"])
def test_every_probe_is_of_the_keys_of_its_own_layer(tmp_path: Path, kind: str) -> None:
    selects = {"reprefill": Select(score_layers=3), "decode": None, "digest": kind}
    with small_engine(tmp_path, system="ckv", overrides=selects) as engine:
        prefix = engine.ingest(tokens(200))
        ask(engine, prefix)
        keys = read_kv(engine.store, prefix)[:, 0].astype(np.float32)
        opened = engine._worker.prefixes.known(prefix)
        digest = opened.digest
        assert digest is not None and opened.digest_bytes > 0
    assert tuple(digest.probes) == prefix.layout.digest_layers
    for layer, probe in digest.probes.items():
        chunks = [keys[layer, at : at + 16] for at in range(0, 200, 16)]
        if isinstance(probe, Int4Keys):
            codes = np.asarray(probe.codes)[:200]
            nibbles = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32) - 8
            held = (nibbles * np.asarray(probe.scale)[:200, :, None]).ravel()
            near = [np.corrcoef(held, (k - k.mean(0)).ravel())[0, 1] for k in keys[:, :200]]
            assert int(np.argmax(near)) == layer and near[layer] > 0.9
        elif isinstance(probe, MeanKeys):
            wanted = np.stack([chunk.mean(0) for chunk in chunks])
            np.testing.assert_allclose(np.asarray(probe.mean, np.float32)[:13], wanted, atol=0.02)
            sizes = np.exp(np.asarray(probe.log_size)[:13])
            np.testing.assert_allclose(sizes[:, 0], [len(chunk) for chunk in chunks], rtol=1e-6)
        else:
            assert isinstance(probe, BoundKeys)
            low = np.stack([chunk.min(0) for chunk in chunks])
            np.testing.assert_array_equal(np.asarray(probe.low, np.float32)[:13], low)
            high = np.stack([chunk.max(0) for chunk in chunks])
            np.testing.assert_array_equal(np.asarray(probe.high, np.float32)[:13], high)


def ask(engine: Engine, prefix: Prefix) -> None:
    request = Request(prefix=prefix, suffix=tokens(5, 1), budget=0.2)
    [result] = engine.reprefill([request])
    assert 0 < result.trace.attention_mass <= 1


def test_the_digest_not_asked_for_longest_goes_first(tmp_path: Path) -> None:
    with small_engine(tmp_path, system="ckv") as engine:
        texts, held = [engine.ingest(tokens(200, n)) for n in range(3)], engine.worker.prefixes
        ask(engine, texts[0])
        held.digest_budget = 2 * held.digest_bytes  # of three
        for which in (1, 0, 2):
            ask(engine, texts[which])
        there = [held.known(text).digest is not None for text in texts]
    assert there == [True, False, True]


@pytest.mark.parametrize("system", ["ckv", "contiguous-kv"])
def test_a_forgotten_prefix_leaves_memory_and_keeps_its_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.setattr(open_prefixes, "MOST_KNOWN", 1)
    with small_engine(tmp_path, system=system) as engine:
        first, second = (engine.ingest(tokens(200, n)) for n in range(2))
        ask(engine, first)
        ask(engine, second)
        kept = engine.store.load_scores(first.spans[0].segment_id)
        assert kept is not None and kept[1].sum() > 0
        engine.demote(second).result()
        tiers = engine.worker.memory.tiers
        assert tiers.device_pages == tiers.host_pages == 0
