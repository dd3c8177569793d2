"""Room for reads: how much there is, who gets it, and when it comes back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_targets import CPU

from ckv_jax.config import EngineConfig
from ckv_jax.prefix import landing as landing_module
from ckv_jax.prefix.landing import HostBlocks, Room
from ckv_jax.prefix.memory import Memory, job_packs
from ckv_jax.prefix.pools import MappedPool
from ckv_jax.storage import Layout
from ckv_jax.storage.codec import CODECS, Quantised
from ckv_jax.systems import SYSTEMS
from tests.support.truth import SMALL

SLOTS = 8
PACKS = job_packs(SMALL)
SYSTEM = replace(SYSTEMS["ckv"], chunk_tokens=SMALL.chunk_tokens)


def memory(layout: Layout = SMALL) -> Memory:
    """Eight work slots and no caches."""
    config = EngineConfig(
        device_cache_bytes=0, host_cache_bytes=0, prefetch_device_bytes=SLOTS * layout.pack_bytes
    )
    return Memory(layout, config, SYSTEM, CPU)


def taken(landing: HostBlocks, n: int) -> Room:
    room = landing.take(n, demand=True)
    assert room is not None
    return room


def test_a_block_comes_back_once_its_read_has_ended() -> None:
    landing, ended = HostBlocks(memory(), SMALL, PACKS * SMALL.stored_bytes, None), [False]
    room = taken(landing, 1)
    landing.give_back(room, lambda: ended[0])
    assert landing.take(1, demand=True) is None
    ended[0] = True
    assert taken(landing, 1).array is room.array


@pytest.mark.parametrize("native", [True, False])
def test_what_is_encoded_is_decoded_into_the_slots_of_the_good_packs(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    coder = CODECS["int8"]
    assert isinstance(coder, Quantised)
    layout = replace(SMALL, head_dim=32)
    layout = replace(layout, codec="int8:1", codec_bytes=coder.num_bytes(layout))
    if not native:
        monkeypatch.setattr(landing_module, "widths", lambda codec, layout: None)
    own = memory(layout)
    landing = HostBlocks(own, layout, 1 << 20, coder)
    room, rng = taken(landing, 3), np.random.default_rng(0)
    packs = rng.standard_normal((3, *layout.pack_shape)).astype(layout.numpy_dtype)
    room.array[:3] = coder.encode(packs, layout)
    slots = landing.place(room, np.array([0, 2]))
    assert isinstance(own.pool, MappedPool)
    pages = own.pool.packs
    wanted = coder.decode(room.array[:3], layout)[[0, 2]]
    np.testing.assert_array_equal(pages[slots].reshape(wanted.shape), wanted)
    others = np.delete(pages, slots, axis=0)
    assert not others.view(np.uint16).any()
    assert taken(landing, 1).array is room.array
