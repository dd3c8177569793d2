"""What a coarse pass of decode has of a digest."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ckv_jax.prefix.open_prefixes import device_digest
from ckv_jax.storage.digest import DigestData

T, D = 64, 16


def size(*probes: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(probes))


CHUNKS, ROOM = 3, 5
"""That a digest is of, and that there is room for."""


def arrays_of(kind: str) -> dict[str, np.ndarray]:
    """A digest of two layers; three chunks of four tokens, the last of which has three."""
    rng, tokens, heads = np.random.default_rng(0), 11, 2

    def some(*shape: int, of: type = np.float32) -> np.ndarray:
        return rng.integers(1, 100, (2, *shape)).astype(of)

    scale = some(tokens, heads)
    landmark = some(CHUNKS, heads, D), some(CHUNKS, heads, D)
    means = {"mean": landmark[0], "log_size": some(CHUNKS, heads)}
    return {
        "int8": {"codes": some(tokens, heads, D, of=np.int8), "scale": scale},
        "int4": {"codes": some(tokens, heads, D // 2, of=np.uint8), "scale": scale},
        "pq": {"codes": some(tokens, heads, 1, of=np.uint8), "codebooks": some(heads, 1, 256, D)},
        "means": means,
        "means+cosines": {**means, "oddity": some(CHUNKS, heads)},
        "bounds": {"low": landmark[0], "high": landmark[1]},
    }[kind]


@pytest.mark.parametrize("kind", ["int8", "int4", "pq", "means", "means+cosines", "bounds"])
def test_a_stored_digest_is_a_probe_a_layer_with_zeros_after_its_end(kind: str) -> None:
    arrays = arrays_of(kind)
    size = 1 if kind not in ("int8", "int4", "pq") else 4
    probes = device_digest(DigestData(kind, arrays), ROOM, 4)
    assert len(probes) == 2
    for row, probe in enumerate(probes):
        assert probe.shape == (ROOM * size, 2, D)
        for name, stored in arrays.items():
            found = np.asarray(getattr(probe, name))
            count = stored.shape[1]
            np.testing.assert_array_equal(found[:count], stored[row])
            if name != "codebooks":
                assert len(found) == ROOM * size and not found[count:].any()
        assert "oddity" in arrays or getattr(probe, "oddity", None) is None


def test_a_digest_of_a_kind_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="got a digest of unknown kind 'int2'"):
        device_digest(DigestData("int2", arrays_of("int8")), ROOM, 4)
