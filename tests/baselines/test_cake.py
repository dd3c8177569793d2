"""Cake: what is computed in place of reads changes no answer, and how much that is."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import CHUNKED, small_engine, tokens
from engine_tiny import TINY

from ckv_jax import Engine, Request, Result
from ckv_jax.baselines.cake import CAKE, Cake, blocks_to_compute
from ckv_jax.storage import ChunkStore, StoreConfig
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.reader import PrefixReader

QUESTION = tokens(9, seed=2).tolist()
NOTHING_CACHED = {"device_cache_bytes": 0, "host_cache_bytes": 0, "model": TINY}
SYSTEM = dataclasses.replace(CHUNKED, name="cake", own=CAKE.own)
TEXT = tokens(1024)
"""Eight blocks; as many packs as say how fast a store is."""
PACK_S = 1e-3


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on every pack takes so long to read."""
    read = PrefixReader.read_packs

    def slow(self: PrefixReader, group: Any, chunks: Any, *args: Any, **more: Any) -> Any:
        time.sleep(seconds * len(chunks))
        return read(self, group, chunks, *args, **more)

    monkeypatch.setattr(PrefixReader, "read_packs", slow)


def asked(engine: Engine, prefix: Prefix) -> Result:
    """An answer at a budget of 1."""
    [found] = engine.reprefill([Request(prefix=prefix, suffix=QUESTION, budget=1.0)])
    found.raise_for_error()
    engine.settle()
    return found


def test_no_request_is_slower_than_reading_or_computing_alone() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 30))
        block_s = np.sort(rng.exponential(size=count))  # later blocks attend to more
        read_s = rng.exponential(size=count) * rng.exponential() * (rng.random(count) < 0.8)
        blocks = blocks_to_compute(block_s, read_s)
        takes = max(block_s[:blocks].sum(), read_s[blocks:].sum())
        assert takes <= min(block_s.sum(), read_s.sum()) + 1e-12


@pytest.mark.parametrize(
    ("block_s", "read_s", "blocks"),
    [
        ([], [1.0], 0),  # nothing is known of computing
        ([1.0] * 4, [0.0] * 4, 0),  # all is cached, or the time of reads is not known
        ([1.0] * 4, [1.0] * 4, 2),
        ([1.0] * 4, [0.1] * 4, 0),  # the first block takes longer than all reads
        ([0.01] * 4, [1.0] * 4, 4),
        ([1.0], [1.0] * 4, 1),  # what later blocks take is not known
    ],
)
def test_how_much_is_computed(block_s: list[float], read_s: list[float], blocks: int) -> None:
    assert blocks_to_compute(block_s, read_s) == blocks


def test_a_slow_store_is_read_in_part_and_a_fast_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_engine(tmp_path, system="ckv", **NOTHING_CACHED) as engine:
        expected = asked(engine, engine.ingest(TEXT))
        assert expected.trace.bytes["ssd"]
    slowed(monkeypatch, PACK_S)
    with small_engine(tmp_path, system=SYSTEM, **NOTHING_CACHED) as engine:
        prefix, cake = engine.ingest(TEXT), engine.worker.executor
        assert isinstance(cake, Cake)
        whole = asked(engine, prefix)  # nothing is known yet
        assert whole.trace.bytes["ssd"] == expected.trace.bytes["ssd"]
        assert cake.pack_s > PACK_S / 3  # by two threads
        assert len(cake.block_s) == 8, "blocks of 128 tokens are measured after it"
        cake.block_s = [cake.pack_s * 128 / 16] * 8  # as long as reading takes
        part = asked(engine, prefix)
        cake.pack_s, cake.block_s = 1e-6, [1.0] * 8  # a fast store is read whole
        fast = asked(engine, engine.ingest(tokens(1024, seed=1)))
    assert "computed_blocks" not in fast.trace.counters
    assert fast.trace.bytes["ssd"] == whole.trace.bytes["ssd"]
    assert 0 < part.trace.counters["computed_blocks"] < 8
    assert part.trace.bytes["ssd"] < whole.trace.bytes["ssd"]
    assert not part.trace.recomputed_chunks
    for found in (whole, part):
        np.testing.assert_array_equal(found.logits, expected.logits)


def test_what_no_prefill_gives_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV that was made under a budget. An encrypted store leaves nothing in files meanwhile."""
    (tmp_path / "key").write_text("ab" * 32)
    sealed = StoreConfig(encrypt_key_file=tmp_path / "key")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with (
        small_engine(tmp_path / "clear", system=SYSTEM, **NOTHING_CACHED) as clear,
        ChunkStore.open(tmp_path / "sealed", config=sealed) as store,
        clear.variant(clear.config, store=store) as engine,
    ):
        cake, exact = engine.worker.executor, engine.ingest(TEXT)
        assert isinstance(cake, Cake)
        asked(engine, exact)
        assert len(cake.block_s) == 8
        with store.writer(
            fingerprint=exact.fingerprint, layout=exact.layout, tokens=exact.tokens,
            salt=exact.salt, provenance="budget:0.5",
        ) as writer:  # fmt: skip
            layout = exact.layout
            shape = layout.num_layers, 2, len(TEXT), layout.num_kv_heads, layout.head_dim
            writer.write(0, np.zeros(shape, layout.numpy_dtype))
            sparse = writer.commit()
        computed = []
        for prefix in (exact, sparse):
            cake.pack_s, cake.block_s = 1.0, [1e-6] * 8
            computed.append(asked(engine, prefix).trace.counters.get("computed_blocks", 0))
    assert computed[0] and not computed[1]
