"""Cache scores outlive the process: what was hot is hot again, and is counted on from there."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from engine_sharp import COLD, POOL_BYTES, Sharp
from engine_support import tokens

from ckv_jax import Engine, Request, Result
from ckv_jax.storage.errors import StoreUnavailable
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore

TEXTS = [tokens(64, 80), tokens(64, 81)]


def ask(engine: Engine, prefix: Prefix) -> Result:
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=[7, 8, 9], budget=1.0)])
    result.raise_for_error()
    return result


def scores(engine: Engine, prefix: Prefix) -> tuple[np.ndarray, np.ndarray]:
    found = engine.store.load_scores(prefix.spans[0].segment_id)
    assert found is not None
    return found


def test_scores_go_on_from_where_they_were(sharp: Sharp, tmp_path: Path) -> None:
    uses = (2, 3)
    seen = []
    for times in uses:
        with sharp.fresh(tmp_path) as engine:
            prefix = engine.ingest(TEXTS[0])
            assert seen or engine.store.load_scores(prefix.spans[0].segment_id) is None
            for _ in range(times):
                ask(engine, prefix)
        with sharp.fresh(tmp_path) as engine:  # nothing is asked: nothing changes either
            seen.append(scores(engine, prefix))
    (first, counted), (second, total) = seen
    assert (counted == uses[0]).all() and (total == sum(uses)).all()
    assert (first > 0).all()
    np.testing.assert_allclose(second, first * sum(uses) / uses[0], rtol=1e-5)


def test_scores_that_cannot_be_read_fail_no_request(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharp.fresh(tmp_path) as engine:
        prefix = engine.ingest(TEXTS[0])
        healthy = ask(engine, prefix)
    late = Mock(side_effect=StoreUnavailable("the disk has not answered"))
    monkeypatch.setattr(ChunkStore, "load_scores", late)
    with sharp.fresh(tmp_path) as engine:
        np.testing.assert_array_equal(ask(engine, prefix).logits, healthy.logits)


@pytest.mark.parametrize("policy", ["frequency-attention", "lfu"])
def test_what_was_hot_takes_the_cache_back(sharp: Sharp, tmp_path: Path, policy: str) -> None:
    """Room for one prefix. A was asked for often, in another process; B comes first in this one."""
    system = {"policy": policy, "prefetch": "intra"}
    with sharp.fresh(tmp_path, system=system) as engine:
        hot, other = (engine.ingest(text) for text in TEXTS)
        for _ in range(6):
            ask(engine, hot)
    room = sharp.layout.groups * hot.num_chunks * sharp.layout.pack_bytes
    small = COLD | {"device_cache_bytes": room, "prefetch_device_bytes": POOL_BYTES - room}
    with sharp.fresh(tmp_path, system=system, **small) as engine:
        assert ask(engine, other).trace.bytes["ssd"] >= room
        assert ask(engine, hot).trace.bytes["device"] == 0
        again = ask(engine, hot)
        assert again.trace.bytes["ssd"] == 0 and again.trace.bytes["device"] == room
        ask(engine, other)  # once more does not make it hotter than what was asked for so often
        assert ask(engine, hot).trace.bytes["device"] == room
