"""An engine whose packs are rounded on disk: near the exact answers, and otherwise as without."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from engine_support import scale_error, tokens
from engine_tiny import tiny_engine
from segment_support import hurt, segment_folder

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.storage import verify_store
from ckv_jax.storage.codec import CODECS

NAMES = [name for name, codec in CODECS.items() if codec is not None]
NEAR = {"int8": 0.01, "k8v4": 0.1}
"""Largest `scale_error` of logits at budget 1.0 from the exact ones."""
TOKENS = tokens(16 * 20 + 5)
SUFFIX = tokens(7, 1).tolist()
NOTHING_KEPT = {"device_cache_bytes": 0, "host_cache_bytes": 0}


def coded(plain: Engine, name: str, **config: object) -> Engine:
    """An engine beside `plain`, with the codec."""
    system = dataclasses.replace(plain.system, codec=name)
    return plain.variant(dataclasses.replace(plain.config, system=system, **config))


def logits(engine: Engine, prefix: object, budget: float = 1.0) -> np.ndarray:
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget=budget)])  # type: ignore[arg-type]
    return result.logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mapped", [True, False])
def test_near_the_exact_answer_and_the_same_warm_and_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mapped: bool
) -> None:
    with tiny_engine(tmp_path, dtype="bfloat16") as plain:
        exact = plain.ingest(TOKENS)
        expected = logits(plain, exact)
        monkeypatch.setattr(Target, "in_host_memory", mapped)
        with coded(plain, name) as engine, coded(plain, name, **NOTHING_KEPT) as cold:
            prefix = engine.ingest(TOKENS)
            assert prefix.id != exact.id
            for budget in (0.25, 1.0):
                first, warm = logits(engine, prefix, budget), logits(engine, prefix, budget)
                np.testing.assert_array_equal(first, warm)
                np.testing.assert_array_equal(first, logits(cold, prefix, budget))
            error = scale_error(logits(cold, prefix), expected)
            assert 0 < error < NEAR[name]
            (result,) = cold.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget=1.0)])
            assert result.codec == f"{name}:1"
            packs = prefix.num_chunks * prefix.layout.groups
            assert result.trace.bytes["ssd"] == packs * prefix.layout.stored_bytes
            (refused,) = plain.reprefill([Request(prefix=prefix, suffix=SUFFIX)])
            assert "codec" in str(refused.error)
        (result,) = plain.reprefill([Request(prefix=exact, suffix=SUFFIX)])
        assert result.codec == "none"


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_a_miss_and_is_mended(tmp_path: Path, name: str) -> None:
    with tiny_engine(tmp_path) as plain, coded(plain, name, **NOTHING_KEPT) as engine:
        prefix = engine.ingest(TOKENS)
        healthy, expected = (
            read_kv(engine.store, prefix, codec=engine.system.coder),
            logits(engine, prefix),
        )
        files = segment_folder(tmp_path, prefix)
        hurt(sorted(files.glob("packs/c.*"))[0], 7 * prefix.layout.stored_bytes + 5)
        hurt(sorted(files.glob("digest/c.*"))[0], 3000)
        with engine.store.reader(prefix) as reader:
            assert reader.read_digest() is None
        # Computed again from what is stored before it, and not from the exact KV.
        assert scale_error(logits(engine, prefix), expected) < NEAR[name]
        mended = engine.ingest(TOKENS)
        assert len(mended.spans) == 1 and verify_store(engine.store).ok
        after = read_kv(engine.store, mended, codec=engine.system.coder)
        bad = np.zeros(len(TOKENS), bool)
        bad[7 * 16 : 8 * 16] = True
        np.testing.assert_array_equal(after[:, :, ~bad], healthy[:, :, ~bad])
        assert scale_error(logits(engine, mended), expected) < NEAR[name]


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_continued_appended_and_found_again(tmp_path: Path, name: str) -> None:
    with tiny_engine(tmp_path) as plain:
        with coded(plain, name, prefill_block=32, prefill_window=64) as engine:
            engine.ingest(TOKENS[:100])
            prefix = engine.ingest(TOKENS)
            assert len(prefix.spans) == 2
            asked = Request(prefix=prefix, suffix=SUFFIX, budget=1.0)
            sampling = SamplingParams(max_tokens=20)
            (said,) = engine.generate(asked, sampling, keep_kv=True).results()
            assert said.codec == f"{name}:1"
            longer = engine.append(said)
            assert longer.provenance == "exact" and len(longer.tokens) > len(TOKENS)
            answer = logits(engine, longer)
        with coded(plain, name) as again:
            found = again.store.longest_prefix(
                longer.tokens, fingerprint=again.fingerprint, layout=again.layout
            )
            assert found.id == longer.id
            np.testing.assert_array_equal(logits(again, found), answer)
