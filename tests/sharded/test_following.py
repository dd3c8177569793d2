"""What a process that follows keeps on its devices: done again here as the leader would say it."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import pytest
from engine_tiny import tiny_engine

from ckv_jax.peers import ALONE
from ckv_jax.processes.follower import Follower


def device_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize(("bounded", "kept"), [(True, False), (False, True)])
def test_a_prefill_that_was_stored_is_dropped_once_done(
    tmp_path: Path, bounded: bool, kept: bool
) -> None:
    with tiny_engine(tmp_path, prefill_block=64) as engine:
        follower = Follower(engine.worker, engine.store, engine.fingerprint, ALONE)
        facts = {"number": 7, "tokens": list(range(20)), "start": 0, "bounded": bounded}
        follower.run([("prefill", facts | {"before": None, "live": []})])
        before = device_bytes()
        follower.run([("block", {"number": 7})])
        # A first token may be asked of what stores nothing.
        assert (device_bytes() >= before) == kept
