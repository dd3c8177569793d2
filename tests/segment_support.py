"""Finding stored segments, and hurting them; what of a folder is open; errors of the kernel;
how long things take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, Layout, Prefix
from ckv_jax.storage.segment.arrays import aligned
from tests.support.truth import FINGERPRINT

ALIKE = Layout(
    num_layers=2, num_kv_heads=2, head_dim=32, pack_layers=1, probe="none", digest="means",
    heads_apart=True, grouping="alike",
)  # fmt: skip


def segment_folder(folder: Path, prefix: Prefix, span: int = 0) -> Path:
    """Where a span's segment lies in the store in `folder`."""
    id_ = prefix.spans[span].segment_id
    return folder / "segments" / id_[:2] / id_


def hurt(path: Path, place: int) -> None:
    """Flip a bit of a byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def packs_memory(layout: Layout, count: int) -> np.ndarray:
    """Memory for packs [count, *pack_shape], as an engine's: fit for direct reads."""
    memory = aligned(count * layout.pack_bytes).view(layout.numpy_dtype)
    return memory.reshape(count, *layout.pack_shape)


def find(store: ChunkStore, tokens: np.ndarray, layout: Layout, **more: bool) -> Prefix:
    """The longest stored prefix of `tokens`."""
    return store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=layout, **more)


def write(
    store: ChunkStore, layout: Layout, tokens: np.ndarray, kv: np.ndarray,
    parent: Prefix | None = None, block: int = 64, **more: Any,
) -> Prefix:  # fmt: skip
    """Stores KV [L, 2, n, K, D] of some tokens, a block at a time."""
    with store.writer(
        fingerprint=FINGERPRINT, layout=layout, tokens=tokens, parent=parent, **more
    ) as writer:
        for start in range(0, len(tokens), block):
            writer.write(start, kv[:, :, start : start + block])
        return writer.commit()


def open_files(folder: Path) -> int:
    """How many files in a folder, and itself, this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += Path(os.readlink(f"/proc/self/fd/{name}")).is_relative_to(folder)
    return found


def lose_index(folder: Path) -> None:
    """Remove the index of the store in `folder`."""
    for file in folder.glob("catalog.sqlite*"):
        file.unlink()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What is done takes less than that."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def wait_until(true: Callable[[], bool]) -> None:
    """Waits for what comes true soon, on a loaded machine, too."""
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.001)


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    fails: Callable[..., object] = lambda *_: True,
) -> Iterator[list[int]]:
    """A call of an `os` function fails where `fails(k, *arguments)`, if it is the k-th; yields the
    count of calls."""
    real, calls = getattr(os, name), [0]

    def call(*args: object, **named: object) -> object:
        calls[0] += 1
        if fails(calls[0], *args):
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        yield calls
