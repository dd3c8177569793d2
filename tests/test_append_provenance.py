"""The exact id means exact KV, whatever a turn stood on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from engine_support import tokens
from engine_tiny import tiny_engine

from ckv_jax import Request, SamplingParams
from ckv_jax.prefix.stored_kv import read_kv


def test_a_turn_over_approximate_kv_is_not_stored_as_exact(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=16)
    with tiny_engine(tmp_path / "a") as engine, tiny_engine(tmp_path / "b") as other:
        document = engine.ingest(tokens(140))
        asked = Request(prefix=document, suffix=tokens(16, 1).tolist(), budget=0.2)
        (first,) = engine.generate(asked, sampling, keep_kv=True).results()
        near = engine.append(first, exact=False)
        assert near.provenance == "budget:0.2"
        assert engine.ingest(near.tokens).provenance == "exact"  # the same tokens, beside it
        again = Request(prefix=near, suffix=tokens(16, 2).tolist(), budget=1.0)
        (second,) = engine.generate(again, sampling, keep_kv=True).results()
        stored = engine.append(second)
        assert stored.provenance == "exact"
        expected = read_kv(other.store, other.ingest(stored.tokens))
        np.testing.assert_allclose(read_kv(engine.store, stored), expected, atol=1e-5)
