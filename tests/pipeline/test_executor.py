from __future__ import annotations

import numpy as np
import pytest

from ckv_jax.pipeline.executor import guessed_chunks


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_rows_share_what_is_guessed_beyond_their_limits(rows: int) -> None:
    limits = np.full(rows, 64, np.int32)
    more = guessed_chunks(limits, 1.25)
    assert more.dtype == np.int32
    assert more.tolist() == [64 + max(1, 16 // rows)] * rows


def test_nothing_is_guessed_for_padding_nor_without_overfetch() -> None:
    limits = np.array([16, 3, 0, 0], np.int32)
    np.testing.assert_array_equal(guessed_chunks(limits, 1.25), [17, 4, 0, 0])
    np.testing.assert_array_equal(guessed_chunks(limits, 1.0), limits)
