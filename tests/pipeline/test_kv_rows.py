"""Rows of decode's buffers that move."""

from __future__ import annotations

import numpy as np
from engine_support import SMALL, compiled_layers

from ckv_jax.pipeline.kv_rows import KvRows


def test_one_row_of_a_batch_moves_up_and_no_other() -> None:
    rows = KvRows(compiled_layers(SMALL, "float32", 0)[0])
    rng = np.random.default_rng(0)
    before = [rng.normal(size=(3, 16, 32)).astype(np.float32) for _ in range(2)]
    ((keys, values),) = rows.shift(((before[0].copy(), before[1].copy()),), 1, 5)
    for was, now in zip(before, (keys, values), strict=True):
        now = np.asarray(now)
        np.testing.assert_array_equal(now[[0, 2]], was[[0, 2]])
        np.testing.assert_array_equal(now[1, :11], was[1, 5:])
