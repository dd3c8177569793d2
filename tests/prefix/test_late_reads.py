"""A read that was given up may still land: nobody else gets its memory before it has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_sharp import COLD, Sharp
from engine_support import TIGHT, scale_error, tokens

from ckv_jax import Request
from ckv_jax.storage.errors import ReadTimeout
from ckv_jax.storage.segment.reader import PrefixReader

Rows = tuple[np.ndarray, np.ndarray]


class SlowDisk:
    """Reads that begin while it `hangs` are given up by the store, and land late: after each read
    of somebody else's, for as long as the disk is not `quiet`. What lands is no KV."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.quiet = False, threading.Event()
        self.late: list[Rows] = []
        real, lock = PrefixReader.read_packs, threading.Lock()

        def read_packs(
            reader: PrefixReader,
            group: int,
            chunks: np.ndarray,
            out: np.ndarray,
            *,
            rows: np.ndarray | None = None,
        ) -> np.ndarray:
            places = np.arange(len(chunks)) if rows is None else np.array(rows)
            if self.hangs:
                with lock:
                    self.late.append((out, places))
                raise ReadTimeout("reading packs", 0.1, self.quiet.is_set)
            good = real(reader, group, chunks, out, rows=rows)
            if not self.quiet.is_set():
                with lock:
                    self.land()
            return good

        monkeypatch.setattr(PrefixReader, "read_packs", read_packs)

    def calm_down(self) -> None:
        """Every read has ended: its memory is anybody's again."""
        self.quiet.set()
        self.quiet, self.late = threading.Event(), []

    def land(self) -> None:
        for out, places in self.late:
            out[places] = 1e3


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    made = SlowDisk(monkeypatch)
    yield made
    made.quiet.set()


@pytest.mark.parametrize(
    ("slots", "buffers"), [(0, 40), (48, 300)], ids=["into slots", "into buffers"]
)
def test_late_reads_hurt_nobody(
    sharp: Sharp, tmp_path: Path, disk: SlowDisk, slots: int, buffers: int
) -> None:
    """Eight chunks of six layers a request; with few slots some of them are read into buffers."""
    pack = sharp.layout.pack_bytes
    room = COLD | {"prefetch_host_bytes": buffers * pack}
    if slots:
        room["prefetch_device_bytes"] = slots * pack
    with sharp.fresh(tmp_path, **room) as engine:
        texts = [engine.ingest(tokens(128, seed)) for seed in range(3)]
        asked = [Request(prefix=p, suffix=tokens(4, 9), budget=1.0) for p in texts]
        expected = [engine.recompute(request).logits for request in asked]

        def right(which: int) -> int:
            (result,) = engine.reprefill([asked[which]])
            result.raise_for_error()
            assert scale_error(result.logits, expected[which]) < TIGHT
            return result.trace.counters.get("recomputed_packs", 0)

        assert right(0) == 0
        for _ in range(3):  # what is never given back is missed sooner or later
            disk.hangs = True
            assert right(0) == 6 * 8  # nothing could be read: all of it is computed
            disk.hangs = False
            assert len(disk.late) > 0
            for which in (1, 2, 0, 1):
                assert right(which) == 0
            disk.calm_down()
            assert right(2) == 0
