"""Keys of any probe as floats, against what the store's own arithmetic says that they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ckv_jax.kernels_pallas.score.probe import BoundKeys, Int4Keys, Keys, MeanKeys, turn
from ckv_jax.prefix.open_prefixes import device_digest
from ckv_jax.selection.base import float_keys
from ckv_jax.storage.digest import DigestData

TOKENS, HEADS, DIM, CHUNK = 24, 2, 16, 8
RNG = np.random.default_rng(0)


def digest(kind: str) -> DigestData:
    """One layer's digest of random codes."""
    width = {"int4": DIM // 2, "pq": DIM // 8}[kind]
    codes = RNG.integers(0, 256, (1, TOKENS, HEADS, width)).astype(np.uint8)
    if kind == "pq":
        books = RNG.normal(size=(1, HEADS, width, 256, 8)).astype(np.float32)
        return DigestData(kind, {"codes": codes, "codebooks": books})
    scale = RNG.uniform(0.1, 1.0, (1, TOKENS, HEADS)).astype(np.float32)
    return DigestData(kind, {"codes": codes, "scale": scale})


def decoded(probe: object, dtype: str = "float32") -> np.ndarray:
    return np.asarray(jax.jit(lambda probe: float_keys(probe, dtype))(probe))


@pytest.mark.parametrize("kind", ["int4", "pq"])
def test_digests_are_decoded_as_the_store_does(kind: str) -> None:
    data = digest(kind)
    (probe,) = device_digest(data, TOKENS // CHUNK, CHUNK)
    found = decoded(probe)
    assert found.dtype == np.float32 and found.shape == probe.shape
    np.testing.assert_allclose(found, data.keys()[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exact_keys_may_be_bit_patterns(dtype: str) -> None:
    keys = jnp.asarray(RNG.normal(size=(TOKENS, HEADS, DIM)), dtype)
    np.testing.assert_array_equal(decoded(Keys(keys), dtype), np.asarray(keys, np.float32))
    if dtype != "float32":
        bits = jax.lax.bitcast_convert_type(keys, jnp.uint16)
        np.testing.assert_array_equal(decoded(Keys(bits), dtype), np.asarray(keys, np.float32))


def test_turned_keys() -> None:
    data = digest("int4")
    (probe,) = device_digest(data, TOKENS // CHUNK, CHUNK)
    assert isinstance(probe, Int4Keys)
    whole = data.keys()[0]
    turned = decoded(turn(probe, dims=DIM))
    assert np.abs(turned - whole).max() < 0.05 * np.abs(whole).max()


def test_landmarks_are_refused() -> None:
    mean = jnp.zeros((3, HEADS, DIM))
    for probe in (MeanKeys(mean, jnp.zeros((3, HEADS))), BoundKeys(mean, mean)):
        with pytest.raises(TypeError, match="one entry a chunk, expected a key for each token"):
            float_keys(probe, "float32")
