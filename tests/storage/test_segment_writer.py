"""A segment's writer: blocks of any size, and memory that waits for slow writes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_support import segment_folder

from ckv_jax.storage import ChunkStore, Layout
from ckv_jax.storage.segment import writer as writers
from ckv_jax.storage.segment.arrays import ArrayWriter
from tests.support.truth import FINGERPRINT, SMALL, kv_of, read_all, some_tokens

SECONDS = 20.0
APART = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "pack_layers": 1, "heads_apart": True}
LAYOUTS = {
    "probe": SMALL,
    "digest": Layout(num_layers=3, num_kv_heads=2, head_dim=8, digest="bounds", probe="heads"),
    "alike, digest": Layout(**APART, probe="none", grouping="alike", digest="means"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_how_much_is_written_at_once_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    tokens = some_tokens(16 * 9 + 5)
    kv, found = kv_of(layout, tokens), []
    for chunks in (1, 4, 100):
        monkeypatch.setattr(writers, "_BLOCK_BYTES", chunks * layout.groups * layout.pack_bytes)
        folder = tmp_path / str(chunks)
        with (
            ChunkStore.open(folder) as store,
            store.writer(fingerprint=FINGERPRINT, layout=layout, tokens=tokens) as writer,
        ):
            writer.write(0, kv[:, :, : 16 * 3])
            writer.write(16 * 3, kv[:, :, 16 * 3 :])
            segment = segment_folder(folder, writer.commit())
        files = [path for path in segment.rglob("c.*") if path.is_file()]
        manifest = json.loads((segment / "manifest.json").read_bytes())["body"]
        data = {str(path.relative_to(segment)): path.read_bytes() for path in files}
        found.append((data, manifest | {"created": 0}))
    assert found[0] == found[1] == found[2]


def test_a_slow_write_keeps_its_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pack is written last: were its memory given to a later block, that would land."""
    ahead = writers._BLOCKS_AHEAD
    monkeypatch.setattr(writers, "_BLOCK_BYTES", 1)  # a block for each chunk
    tokens = some_tokens(16 * 4 * ahead)
    kv = kv_of(SMALL, tokens)
    others = threading.Semaphore(0)
    real, lock, puts = ArrayWriter.put, threading.Lock(), []

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> Any:
        with lock:
            puts.append(entry)
            first = len(puts) == 1
        if first:  # until as many others as can be written without this block's memory have been
            for _ in range((ahead - 1) * SMALL.groups):
                assert others.acquire(timeout=SECONDS)
        real(self, entry, data, offset)
        if not first:
            others.release()

    monkeypatch.setattr(ArrayWriter, "put", put)
    with (
        ChunkStore.open(folder) as store,
        store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer,
    ):
        for start in range(0, len(tokens), 64):
            writer.write(start, kv[:, :, start : start + 64])
        prefix = writer.commit()
        outcome = read_all(store, prefix)
    assert (outcome.wrong, outcome.refused) == (0, 0)
    assert outcome.right == SMALL.groups * prefix.num_chunks


def test_a_writer_that_is_left_waits_for_its_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread may write into memory or a folder that its writer has given up."""
    running, go, ended = threading.Event(), threading.Event(), list[int]()
    real = ArrayWriter.put

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> None:
        running.set()
        assert go.wait(SECONDS)
        real(self, entry, data, offset)
        ended.append(entry)

    monkeypatch.setattr(ArrayWriter, "put", put)
    tokens = some_tokens(32)
    with ChunkStore.open(folder) as store:
        writer = store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens)
        writer.write(0, kv_of(SMALL, tokens))
        assert running.wait(SECONDS)
        threading.Timer(0.05, go.set).start()
        writer.close()
        count = len(ended)
        assert count >= SMALL.groups
        assert not list((folder / "tmp").iterdir()) and store.usage() == 0
    assert len(ended) == count
