"""A disk that fails while texts run, each head choosing for itself: who is told, who is not hurt.

What a text generated lies in segments of its own, which are read like the prefix under them.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine_sharp import COLD, Sharp
from engine_support import tokens
from segment_support import hurt, segment_folder

from ckv_jax import Request, SamplingParams
from ckv_jax.decode.window import Window
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.prefix.tiers import PoolExhausted
from ckv_jax.serving.offload import Offload
from ckv_jax.serving.sequence import generation_of
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.reader import PrefixReader
from ckv_jax.systems import SYSTEMS

ALIKE = SYSTEMS["kvdrive"]
LENGTH = 215
SEGMENT = 96
"""Of which those tokens are grouped that are not among the last 64."""


def asked(prefix: Prefix, budget: float = 0.2) -> Request:
    return Request(prefix=prefix, suffix=tokens(7, 40).tolist(), budget=budget)


def hurt_all(folder: Path, prefix: Prefix) -> None:
    """Flips a bit of every pack of a prefix's last segment."""
    for path in segment_folder(folder, prefix, -1).glob("packs/c.*"):
        for start in range(0, path.stat().st_size, prefix.layout.pack_bytes):
            hurt(path, start)


@pytest.mark.slow
def test_a_generation_whose_own_segment_is_lost_goes_on_and_no_other_changes(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharp.fresh(tmp_path, system=ALIKE, segment_tokens=SEGMENT, **COLD) as engine:
        prefix, other = engine.ingest(tokens(150)), engine.ingest(tokens(170, 1))
        sampling = SamplingParams(max_tokens=LENGTH)
        both = [asked(prefix), asked(other)]
        healthy = engine.generate(both, sampling).results()  # programs of the same shapes
        move, lost = Window.onto, []

        def moved(self: Window, opened: OpenPrefix) -> None:
            move(self, opened)
            own = opened.prefix
            if np.array_equal(own.tokens[:150], prefix.tokens):  # no token is made meanwhile
                hurt_all(tmp_path, own)
                lost.append(own)

        monkeypatch.setattr(Window, "onto", moved)
        texts = engine.generate(both, sampling).results()
        assert len(lost) == 1
        for text in texts:
            text.raise_for_error()
            assert len(text.token_ids) == LENGTH and text.trace.segments == 1
        recomputed = [
            sum(token.recomputed for token in text.trace.tokens) for text in (healthy[0], texts[0])
        ]
        assert recomputed[0] == 0 < recomputed[1]
        assert texts[1].token_ids.tolist() == healthy[1].token_ids.tolist()
        assert engine.stats().pinned_packs == engine.stats().running == 0


def test_a_generation_cancelled_while_its_packs_are_fetched_changes_no_other(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sharp.fresh(tmp_path, system=ALIKE, **COLD) as engine:
        prefix, other = engine.ingest(tokens(250)), engine.ingest(tokens(230, 1))
        sampling = SamplingParams(max_tokens=40)
        [alone] = engine.generate(asked(other), sampling).results()
        read, reading, given_up = PrefixReader.read_packs, threading.Event(), threading.Event()

        def slow(self: PrefixReader, *args: object, **named: object) -> np.ndarray:
            if self.prefix.id == prefix.id and held:
                reading.set()
                assert given_up.wait(60)
            return read(self, *args, **named)  # type: ignore[arg-type]

        held: list[bool] = []
        monkeypatch.setattr(PrefixReader, "read_packs", slow)
        first = engine.submit(asked(prefix), SamplingParams(max_tokens=400))
        second = engine.submit(asked(other), sampling)
        deadline = time.monotonic() + 60
        while not first.token_ids:
            assert not first.done() and time.monotonic() < deadline
            time.sleep(0.001)
        held.append(True)
        assert reading.wait(60)
        first.cancel()
        given_up.set()
        texts = [generation_of(sequence, settled=True) for sequence in (first, second)]
        assert texts[0].completion().finish_reason == "cancelled"
        assert texts[1].token_ids.tolist() == alone.token_ids.tolist()
        assert engine.stats().pinned_packs == engine.stats().running == 0
        assert engine._worker.memory.tiers.pinned_slots == 0


def test_a_text_that_attends_to_all_goes_on_where_the_pool_has_no_room_for_its_segment(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else has taken the slots since they were counted."""
    with sharp.fresh(tmp_path, segment_tokens=32) as engine:
        prefix, sampling = engine.ingest(tokens(150)), SamplingParams(max_tokens=160)
        [plain] = engine.generate(asked(prefix, 1.0), sampling).results()
        attend, memory = Offload._attend_all, engine._worker.memory
        failed: list[PoolExhausted] = []

        def crowded(self: Offload, window: Window, opened: OpenPrefix) -> None:
            slots = memory.take(memory.step_slots)  # all that are free or cached
            try:
                attend(self, window, opened)
            except PoolExhausted as error:
                failed.append(error)
                raise
            finally:
                memory.tiers.release(slots)

        monkeypatch.setattr(Offload, "_attend_all", crowded)
        [text] = engine.generate(asked(prefix, 1.0), sampling).results()
        text.raise_for_error()
        assert failed and text.token_ids.tolist() == plain.token_ids.tolist()
        assert (plain.trace.segments, text.trace.segments) == (2, 0)
        assert "cannot store generated tokens" in caplog.text
        assert engine.stats().pinned_packs == engine.stats().running == 0
