"""What a sequence's window keeps when it is given other widths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from engine_support import small_engine, tokens

from ckv_jax.cache.window import FREE
from ckv_jax.pipeline.window import Window


def test_slots_that_open_again_know_nothing_of_what_stood_there(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:
        worker = engine._worker
        resident = worker.residents.open(engine.ingest(tokens(200)))
        window = Window(resident, worker.memory, worker.plan, held=True)
        wide, narrow = np.array([6, 6]), np.array([3, 6])
        window.resize(wide)
        window.kept.last[...], window.kept.uses[...] = 7, 2  # of chunks that have left
        kept = window.kept
        window.resize(wide)
        assert window.kept is kept  # nothing changes
        window.resize(narrow)
        assert window.kept.open.tolist() == narrow.tolist()
        window.resize(wide)
        assert (window.kept.chunk == FREE).all()
        assert window.kept.last.tolist() == [[7, 7, 7, -1, -1, -1], [7] * 6]
        assert window.kept.uses.tolist() == [[2, 2, 2, 0, 0, 0], [2] * 6]
