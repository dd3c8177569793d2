"""A place that tests of its parts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckv_jax.storage.place.local import LocalFiles


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that is a store."""
    LocalFiles(tmp_path / "store").close()
    return tmp_path / "store"
