"""What a prefix's view holds on the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_support import SMALL, small_engine, tokens

from ckv_jax import Request
from ckv_jax.kernels_pallas.score.probe import Int4Keys
from ckv_jax.stored_kv import read_kv


@pytest.mark.parametrize("score_layers", [1, 3, 4])
def test_every_probe_of_a_digest_is_of_its_own_layer(tmp_path: Path, score_layers: int) -> None:
    with small_engine(tmp_path, system="ckv", overrides={"score_layers": score_layers}) as engine:
        prefix = engine.ingest(tokens(200))
        engine.reprefill([Request(prefix=prefix, suffix=tokens(5, 1), budget=0.2)])
        keys = read_kv(engine.store, prefix)[:, 0]
        digest = engine._worker.residents.open(prefix).digest
    assert digest is not None and tuple(digest) == prefix.layout.digest_layers
    assert len(digest) == {1: 3, 3: 8, 4: 10}[score_layers] and SMALL.num_layers == 10
    for layer, probe in digest.items():
        assert isinstance(probe, Int4Keys)
        codes = np.asarray(probe.codes)[:200]
        nibbles = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32) - 8
        held = (nibbles * np.asarray(probe.scale)[:200, :, None]).ravel()
        near = [np.corrcoef(held, (k - k.mean(0)).ravel())[0, 1] for k in keys[:, :200]]
        assert int(np.argmax(near)) == layer and near[layer] > 0.9
