from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_targets import CPU

from ckv_jax.kernels_pallas.gather import gather

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint16"]


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def random_pages(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Every bit pattern but NaNs, which some processors make quiet."""
    raw = rng.integers(0, 256, (*shape, jnp.dtype(dtype).itemsize), dtype=np.uint8)
    values = raw.view(jnp.dtype(dtype))[..., 0]
    with np.errstate(invalid="ignore"):
        return jnp.asarray(np.where(values == values, values, np.zeros_like(values)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_bit_for_bit(kernel: Callable[..., Any], dtype: str) -> None:
    rng = np.random.default_rng(0)
    pages = random_pages(rng, (7, 2, 16, 2, 32), dtype)
    table = np.asarray([[3, 3, -1, 0, 6], [7, 2, 5, 2**31 - 1, -(2**31)]], np.int32)
    out = kernel("gather", pages, jnp.asarray(table))
    assert out.shape == (2, 5, 2, 16, 2, 32)
    assert out.dtype == pages.dtype
    inside = (table >= 0) & (table < 7)
    expected = np.where(
        inside[..., None, None, None, None], bits(pages)[np.clip(table, 0, 6)], np.uint8(0)
    )
    np.testing.assert_array_equal(bits(out), expected)


def test_pages_larger_than_a_block(kernel: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    pages = random_pages(rng, (3, 6, 16, 2, 64), "bfloat16")  # 24 KiB, in blocks of 2 KiB
    table = np.asarray([[2, 0, 2]], np.int32)
    options = {"mosaic_gpu": {"bytes": 2048}, "tpu": {"entries": 2}}
    out = kernel("gather", pages, jnp.asarray(table), **options)
    np.testing.assert_array_equal(bits(out), bits(pages)[table])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_single_rows(kernel: Callable[..., Any], dtype: str) -> None:
    rng = np.random.default_rng()
    rows = random_pages(rng, (48, 256), dtype)
    table = rng.integers(0, 48, (2, 13)).astype(np.int32)
    table[1, 3:] = -1
    table[0, 2] = 48
    out = kernel("gather", rows, jnp.asarray(table))
    inside = (table >= 0) & (table < 48)
    expected = np.where(inside[..., None], bits(rows)[np.clip(table, 0, 47)], np.uint8(0))
    np.testing.assert_array_equal(bits(out), expected)


def test_says_what_it_got() -> None:
    pages = jnp.zeros((3, 16, 8))
    with pytest.raises(ValueError, match=r"got table int32\[3\]|got table int32\(3,\)"):
        gather(pages, jnp.zeros(3, jnp.int32), target=CPU)
    with pytest.raises(ValueError, match="float32"):
        gather(pages, jnp.zeros((1, 3)), target=CPU)
    with pytest.raises(ValueError, match="P > 0"):
        gather(pages[:0], jnp.zeros((1, 3), jnp.int32), target=CPU)
