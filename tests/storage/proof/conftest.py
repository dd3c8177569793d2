"""A scene in memory for the bounded proofs; `python -m tests.faults` runs them in full."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.faults import scene


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)  # an index that is lost on purpose need not be reported
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def scenes() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="ckv-proof-", dir=memory))
    scene.prepare(folder)
    yield folder
    shutil.rmtree(folder)
