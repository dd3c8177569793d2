"""Ingest and append over a stored text that is late: a miss that is computed, never an error."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_support import tokens
from engine_tiny import tiny_engine
from slow_reads import slow_reads

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.prefix.stored_kv import read_kv
from ckv_jax.storage import ReadTimeout, StoreUnavailable
from ckv_jax.storage.segment import reader as readers
from ckv_jax.storage.segment.segment import Segment


def make_late(engine: Engine, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """No read of a digest, or no read at all, comes in time from now on."""
    if what == "all":
        config = dataclasses.replace(engine.store.config, deadline_s=1e-9)
        monkeypatch.setattr(engine.store, "config", config)
        slow_reads(monkeypatch)

    def late(*_: object) -> None:
        raise ReadTimeout("reading a digest", 1e-9, lambda: True)

    real = Segment.reread

    def reread(self: Segment, kind: str, *where: int, **named: object) -> Any:
        if kind == "digest":
            raise StoreUnavailable("the disk has not answered")
        return real(self, kind, *where, **named)

    monkeypatch.setattr(readers, "read_digest", late)
    monkeypatch.setattr(Segment, "reread", reread)


@pytest.mark.parametrize("what", ["digest", "all"])
def test_ingest_and_append_go_on_over_a_late_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    text, sampling = tokens(16 * 20), SamplingParams(max_tokens=8)
    with tiny_engine(tmp_path / "a") as engine, tiny_engine(tmp_path / "b") as other:
        parent = engine.ingest(text[: 16 * 9])
        assert parent.layout.digest_params
        document = engine.ingest(tokens(16 * 9 + 5, 2))  # its last chunk is read, to be rewritten
        asked = Request(prefix=document, suffix=tokens(16, 1).tolist(), budget=1.0)
        with monkeypatch.context() as patch:
            make_late(engine, patch, what)
            ingested = engine.ingest(text)
            (turn,) = engine.generate(asked, sampling, keep_kv=True).results()
            appended = engine.append(turn)
        assert ingested.num_tokens == len(text) and appended.num_tokens > document.num_tokens
        assert (len(ingested.spans) == 2) == (what == "digest")  # else computed as a whole
        for stored in (ingested, appended):
            assert stored.provenance == "exact"
            expected = read_kv(other.store, other.ingest(stored.tokens))
            np.testing.assert_allclose(read_kv(engine.store, stored), expected, atol=1e-5)
        assert engine.store.stats()["quarantined"] == 0
