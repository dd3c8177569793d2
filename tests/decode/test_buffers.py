"""Rows of decode's buffers that move."""

from __future__ import annotations

import numpy as np
from engine_support import SMALL, compiled_layers

from ckv_jax.decode.decoder import KvRows, rows_bucket


def test_one_row_of_a_batch_moves_up_and_no_other() -> None:
    rows = KvRows(compiled_layers(SMALL, "float32", 0)[0])
    rng = np.random.default_rng(0)
    before = [rng.normal(size=(3, 16, 32)).astype(np.float32) for _ in range(2)]
    ((keys, values),) = rows.shift(((before[0].copy(), before[1].copy()),), 1, 5)
    for was, now in zip(before, (keys, values), strict=True):
        now = np.asarray(now)
        np.testing.assert_array_equal(now[[0, 2]], was[[0, 2]])
        np.testing.assert_array_equal(now[1, :11], was[1, 5:])


def test_buffers_hold_a_power_of_two_of_tokens() -> None:
    sizes = {1: 64, 64: 64, 65: 128, 128: 128, 129: 256}
    assert {tokens: rows_bucket(tokens) for tokens in sizes} == sizes


def test_a_buffer_that_grows_or_is_cut_keeps_what_it_has_and_ends_in_zeros() -> None:
    rows = KvRows(compiled_layers(SMALL, "float32", 0)[0])
    kv = np.random.default_rng(0).normal(size=(2, 2, 3, 8)).astype(np.float32)
    pair = (kv[0], kv[1])
    for size in (2, 3, 5):
        wanted = np.zeros((2, 2, size, 8), np.float32)
        wanted[:, :, :3] = kv[:, :, :size]
        np.testing.assert_array_equal(np.stack(rows.resize((pair,), size)[0]), wanted)
        np.testing.assert_array_equal(np.stack(rows.pick((pair,), 1, size)[0]), wanted[:, 1:])
    np.testing.assert_array_equal(rows.read((pair, pair), 1, 1, 3), np.stack([kv[:, 1, 1:3]] * 2))
    taken = rows.take((pair,), np.array([1, 1, 0], np.int32))
    np.testing.assert_array_equal(np.stack(taken[0]), kv[:, [1, 1, 0]])
