"""The bytes of a segment are what they were, and are read as they lie into slots of [C, K*D]."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from kernel_targets import CPU

from ckv_jax.config import EngineConfig
from ckv_jax.kernels_pallas.target import Target
from ckv_jax.prefix.landing import landing_for
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.pools import slot_shape
from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.systems import system_named
from tests.support.truth import SMALL, ingest, packs_of, some_tokens

APART = Layout(
    num_layers=2, num_kv_heads=4, head_dim=16, pack_layers=1, kv_together=False, chunk_tokens=64,
    probe="heads",
)  # fmt: skip
WRITTEN_BEFORE = {
    "together": (SMALL, "b95f63461f29a78c9a58ee878a89cdaf743d635b6ecb589ffd7543d835d271ca"),
    "apart": (APART, "e53704ae4fbe51e49228eb4fd9320f2ca78e0f5171db42481957cd9427b2d73a"),
}
"""SHA-256 of packs and probes as the code wrote them when slots were [C, K, D]."""


def content(folder: Path) -> str:
    """One hash of the arrays of a store's only segment, their names and bytes."""
    [segment] = folder.glob("segments/*/*")
    found = hashlib.sha256()
    for file in sorted(path for path in segment.glob("*/*") if path.is_file()):
        found.update(f"{file.relative_to(segment)} {file.stat().st_size}\n".encode())
        found.update(file.read_bytes())
    return found.hexdigest()


@pytest.mark.parametrize("name", WRITTEN_BEFORE)
@pytest.mark.parametrize("mapped", [True, False])
def test_stores_of_before_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mapped: bool
) -> None:
    layout, before = WRITTEN_BEFORE[name]
    tokens = some_tokens(213)
    with ChunkStore.open(tmp_path) as store:
        prefix = ingest(store, tokens, layout=layout)
        assert content(tmp_path) == before
        monkeypatch.setattr(Target, "in_host_memory", mapped)
        config = EngineConfig(device_cache_bytes=2**20, prefetch_host_bytes=2**20)
        system = dataclasses.replace(system_named("ckv"), chunk_tokens=layout.chunk_tokens)
        memory = Memory(layout, config, system, CPU)
        landing = landing_for(memory, layout, host_bytes=2**20)
        chunks = np.arange(prefix.num_chunks)[::-1].copy()
        with store.reader(prefix) as reader:
            for group in range(layout.groups):
                room = landing.take(len(chunks), demand=True)
                assert room is not None
                assert reader.read_packs(group, chunks, room.array, rows=room.rows).all()
                slots = landing.place(room, np.arange(len(chunks)))
                pages = np.asarray(memory.pool.pages)[slots]
                assert pages.shape[1:] == slot_shape(layout)
                truth = packs_of(layout, tokens, group, np.arange(len(tokens)))[chunks]
                assert pages.tobytes() == np.ascontiguousarray(truth).tobytes()
