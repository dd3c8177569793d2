"""A block's memory is taken again only once all of it is on the disk."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore
from ckv_jax.storage.segment import writer as writers
from ckv_jax.storage.segment.arrays import ArrayWriter
from tests.support.truth import FINGERPRINT, SMALL, kv_of, read_all, some_tokens

SECONDS = 20.0


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
    running, go, ended = threading.Event(), threading.Event(), []
    real = ArrayWriter.put

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> Any:
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


def test_three_blocks_may_wait_for_a_slow_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), ArrayWriter.put

    def put(self: ArrayWriter, entry: int, data: np.ndarray, offset: int = 0) -> Any:
        assert go.wait(SECONDS)
        real(self, entry, data, offset)

    monkeypatch.setattr(writers, "_BLOCK_BYTES", 1)  # a block for each chunk
    monkeypatch.setattr(ArrayWriter, "put", put)
    size = SMALL.chunk_tokens
    tokens = some_tokens(4 * size)
    kv = kv_of(SMALL, tokens)
    with (
        ThreadPoolExecutor(1) as caller,
        ChunkStore.open(folder) as store,
        store.writer(fingerprint=FINGERPRINT, layout=SMALL, tokens=tokens) as writer,
    ):
        blocks = [
            caller.submit(writer.write, start, kv[:, :, start : start + size])
            for start in range(0, len(tokens), size)
        ]
        try:
            blocks[2].result(SECONDS)
            assert not blocks[3].done()
        finally:
            go.set()
        blocks[3].result(SECONDS)
        assert writer.commit().num_tokens == len(tokens)
