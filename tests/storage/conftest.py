"""What the store's tests share: a store in a fresh folder, one to be hurt, the kernel's queues."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckv_jax.storage import ChunkStore, layout
from ckv_jax.storage.place.kernel_queue import FILE_ALIGN, KernelQueues
from tests.faults.tally import make_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(folder) as opened:
        yield opened


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike tokens are grouped in runs of four chunks."""
    monkeypatch.setattr(layout, "RUN", 64)


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "store"
    make_store(folder)
    return folder


@pytest.fixture
def pristine(_made: Path, tmp_path: Path) -> Path:
    """A store of `prompts`, to be hurt: a copy of one that was made for all."""
    return Path(shutil.copytree(_made, tmp_path / "pristine"))


@pytest.fixture
def queues(file: Path) -> KernelQueues:
    """The kernel's queues; skips where it has none, or the disk is not read directly."""
    try:
        made = KernelQueues()
    except OSError as e:
        pytest.skip(f"no asynchronous reads here: {e}")
    if not made.works(file):
        pytest.skip("no direct I/O on this file system")
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """300 pages of a disk, of random bytes."""
    path = tmp_path / "pages"
    path.write_bytes(np.random.default_rng(0).bytes(300 * FILE_ALIGN))
    return path
