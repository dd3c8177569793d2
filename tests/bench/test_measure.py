"""Samples are read off a request's own trace."""

from __future__ import annotations

import numpy as np
import pytest

from bench.measure import Sample, row_of
from ckv_jax.request import FirstAnswer, Request, Result
from ckv_jax.storage.layout import Layout
from ckv_jax.trace import Trace

TOKENS = Layout(
    num_layers=2, num_kv_heads=2, head_dim=8, chunk_tokens=64, pack_layers=1, kv_together=False,
    probe="heads",
)  # fmt: skip
CHUNKS = Layout(num_layers=2, num_kv_heads=2, head_dim=8, pack_layers=2)


def result(
    packs: int, layout: Layout, *, probe: int = 0, unused: int = 0, needed: int = 0
) -> Result:
    trace = Trace()
    for number in range(packs):
        trace.add("pack_read", "ssd", number, number + 1, bytes=layout.pack_bytes)
    trace.count_bytes("ssd", packs * layout.pack_bytes + probe)
    trace.count_bytes("unused", unused * layout.pack_bytes)
    if needed:
        trace.count("ssd_tokens_needed", needed)
    trace.end()
    answer = FirstAnswer(token_id=1, text="", logits=np.zeros(3, np.float32))
    return Result(request=Request(prefix=[1], suffix=[2]), trace=trace, answer=answer)


def test_whole_chunks_are_needed_whole() -> None:
    sample = Sample.of(5.0, result(10, CHUNKS, unused=2), CHUNKS, chunked=True)
    assert sample.demanded_bytes == sample.needed_bytes == 8 * CHUNKS.pack_bytes
    assert sample.read_amplification == 1.0
    assert sample.probe_bytes == 0


def test_tokens_within_chunks_are_not() -> None:
    # 10 packs of 64 tokens' keys or values, of which 160 were important.
    sample = Sample.of(5.0, result(10, TOKENS, probe=999, needed=160), TOKENS, chunked=False)
    assert sample.read_amplification == pytest.approx(4.0)
    assert sample.probe_bytes == 999


def test_row_counts_whole_tokens() -> None:
    samples = [Sample.of(t, result(4, CHUNKS), CHUNKS, chunked=True) for t in (10.0, 20.0)]
    row = row_of("ckv", 0.05, "default", samples, CHUNKS)
    assert row["ttft_ms"]["mean"] == 15.0
    assert row["tokens_loaded"] == 64  # 4 packs of 16 tokens over both layers
    assert row["read_amplification"] == row["read_amplification_with_unused"] == 1.0
    assert row["hit_rate"] == {"device": 0.0, "host": 0.0}
