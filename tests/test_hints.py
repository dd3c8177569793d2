"""What is brought to memory before anybody asks, and let go after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_support import MIB, tokens
from engine_tiny import tiny_engine

from ckv_jax import Engine, Prefix, Request, SamplingParams
from ckv_jax.storage.errors import FingerprintMismatch

SUFFIX = tokens(9, 5)


def ask(engine: Engine, prefix: Prefix, budget: float = 0.2) -> tuple[np.ndarray, dict[str, int]]:
    """Logits, and where the bytes came from."""
    [result] = engine.reprefill([Request(prefix=prefix, suffix=SUFFIX, budget=budget)])
    result.raise_for_error()
    return result.logits, {name: result.trace.bytes[name] for name in ("ssd", "host", "device")}


def packs(prefix: Prefix) -> int:
    return prefix.num_chunks * prefix.layout.groups


def test_what_was_let_go_is_read_again_and_what_was_brought_is_not(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(300))
        first, cold = ask(engine, prefix)
        again, warm = ask(engine, prefix)
        assert cold["ssd"] > 0 and warm["ssd"] == 0
        assert engine.demote(prefix).result() == warm["device"] // prefix.layout.pack_bytes
        assert engine.stats().digest_bytes == 0
        third, read = ask(engine, prefix)
        assert read["ssd"] > warm["device"]  # the digest, too, and what was read ahead in vain
        assert read["device"] == read["host"] == 0
        engine.demote(prefix).result()
        assert engine.prefetch(prefix, budget=0.2).result() > 0
        assert engine.stats().digest_bytes > 0
        fourth, brought = ask(engine, prefix)  # the packs that it attended to most before
        assert brought == warm
        for logits in (again, third, fourth):
            assert np.array_equal(logits, first)


def test_a_prefix_without_requests_fills_what_is_free(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, device_cache_bytes=4 * MIB) as engine:
        prefix = engine.ingest(tokens(300))
        assert engine.prefetch(prefix, budget=1.0).result() == packs(prefix)
        assert ask(engine, prefix, 1.0)[1]["ssd"] == 0
        assert engine.demote(prefix).result() == packs(prefix)
        assert engine.prefetch(prefix, budget=1e-6).result() == prefix.layout.groups  # a chunk


def test_a_hint_reads_few_packs_between_two_tokens_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckv_jax.serving.warmup._MAX_PACKS_PER_READ", 8)
    with tiny_engine(tmp_path) as engine:
        prefix, worker, parts = engine.ingest(tokens(300)), engine.worker, []
        make_way = worker.make_way
        monkeypatch.setattr(worker, "make_way", lambda n: (parts.append(n), make_way(n)))
        assert engine.prefetch(prefix, budget=1.0).result() == packs(prefix)
    assert parts == [7, 6, 6] * prefix.layout.groups


def test_what_is_worth_more_stays(tmp_path: Path) -> None:
    config = {"device_cache_bytes": MIB // 16, "host_cache_bytes": 0}
    with tiny_engine(tmp_path, **config) as engine:
        asked, other = engine.ingest(tokens(300)), engine.ingest(tokens(300, 1))
        ask(engine, asked, 1.0)
        _, before = ask(engine, asked, 1.0)
        assert 0 < before["device"] < before["ssd"]  # the cache is full
        assert engine.prefetch(other, budget=1.0).result() == 0
        assert ask(engine, asked, 1.0)[1] == before


def test_nothing_stored_has_nothing_in_memory(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        empty = Prefix.empty(engine.fingerprint, engine.layout, "")
        assert engine.prefetch(empty).result() == engine.demote(empty).result() == 0
        assert engine.last_selection(empty) == []


def test_texts_that_run_keep_what_they_use(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        prefix = engine.ingest(tokens(300))
        request, ways = Request(prefix=prefix, suffix=SUFFIX), SamplingParams(max_tokens=24)
        [alone] = engine.generate(request, ways).results()
        stream = engine.generate(request, ways)
        next(iter(stream))
        engine.demote(prefix).result()
        engine.prefetch(prefix).result()
        engine.demote(prefix).result()
        [found] = stream.results()
        assert found.token_ids.tolist() == alone.token_ids.tolist()


def test_prefixes_that_are_gone_or_of_another_model(tmp_path: Path) -> None:
    with tiny_engine(tmp_path / "a") as engine:
        prefix = engine.ingest(tokens(300))
        with tiny_engine(tmp_path / "b", seed=1) as other:
            for hint in (other.prefetch, other.demote):
                with pytest.raises(FingerprintMismatch):
                    hint(prefix)
        with pytest.raises(ValueError, match="budget=0"):
            engine.prefetch(prefix, budget=0)
        engine.store.delete(prefix)
        assert engine.prefetch(prefix).result() == 0  # there is nothing to bring
        assert engine.demote(prefix).result() == 0
