"""What the store's tests share: the checkout on the path, and a store in a fresh folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from ckv_jax.storage import ChunkStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(folder) as opened:
        yield opened
