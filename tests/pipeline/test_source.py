"""A slot changes hands only after the calls that were given it have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckv_jax.reads.packs import PackSource
from ckv_jax.trace import Trace
from tests.engine_support import small_engine, tokens

WORK = 12


class Call:
    """Stands for the result of a dispatched call, as far as `PackSource.done` asks of one."""

    def __init__(self) -> None:
        self.ended = False
        self.waited = False

    def is_ready(self) -> bool:
        return self.ended

    def block_until_ready(self) -> None:
        self.ended = self.waited = True


@pytest.mark.parametrize("ended", [False, True])
def test_slots_wait_for_the_calls_that_read_them(tmp_path: Path, ended: bool) -> None:
    with small_engine(tmp_path, device_cache_bytes=0, host_cache_bytes=0) as plain:
        prefix = plain.ingest(tokens(16 * WORK))
        work = WORK * plain.layout.pack_bytes
    with small_engine(
        tmp_path, device_cache_bytes=0, host_cache_bytes=0, prefetch_device_bytes=work
    ) as engine:
        parts, chunks, call = engine._parts, np.arange(WORK), Call()
        after: Any = call
        with (
            engine.store.reader(prefix) as reader,
            parts.views.using(prefix) as view,
            PackSource(
                view=view,
                reader=reader,
                memory=parts.memory,
                prefetcher=parts.prefetcher,
                recompute=lambda group, chunks: pytest.fail("every pack can be read"),
                trace=Trace(),
            ) as source,
        ):
            source.demand(0, chunks)
            first = source.collect(0, chunks)
            before = parts.memory.pool.pages[first]
            source.done(0, after)
            call.ended = ended
            source.demand(1, chunks)  # into the slots only if nothing can still be reading them
            assert not call.waited
            arena = parts.prefetcher.stats.buffer_bytes
            assert (arena == 0) == ended
            if not ended:
                now = parts.memory.pool.pages[first]
                np.testing.assert_array_equal(np.asarray(now), np.asarray(before))
            second = source.collect(1, chunks)
            assert call.waited == (not ended)
            assert sorted(second) == sorted(first)
