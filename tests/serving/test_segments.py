"""Long texts: what they generated becomes segments of their own, and device memory stays level."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from engine_sharp import POOL_BYTES, Sharp
from engine_support import TIGHT, scale_error, tokens

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines.decoding import HoldNothing, decoding, lru
from ckv_jax.config import EngineConfig, OwnParts
from ckv_jax.decode.decoder import rows_bucket
from ckv_jax.prefix.open_prefixes import OpenPrefixes
from ckv_jax.serving.offload import SegmentRemover, most_buffered
from ckv_jax.serving.sequence import generation_of
from ckv_jax.storage.errors import StoreFull, StoreUnavailable
from ckv_jax.storage.index.index import Index
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore

SEGMENT = 32
SAMPLING = SamplingParams(max_tokens=150)
"""The first segment after 32 + 64 tokens, and one for every 32 from there on."""
SEGMENTS = 2
ENDLESS = 1500
"""Of a text that is given up, however far it runs ahead of who reads it."""


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store"), segment_tokens=SEGMENT) as made:
        yield made


@pytest.fixture(scope="module")
def document(engine: Engine) -> Prefix:
    return engine.ingest(tokens(150))  # its last chunk is not whole


def asked(document: Prefix, budget: float, seed: int = 40) -> Request:
    return Request(prefix=document, suffix=tokens(7, seed).tolist(), budget=budget)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60  # of a loaded machine; nothing is measured
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    assert true()


def settled(engine: Engine, document: Prefix, *others: Prefix) -> None:
    """Nothing of any text is left."""
    kept = {span.segment_id for prefix in (document, *others) for span in prefix.spans}
    segments = engine._worker.decoding.offload
    wait_until(lambda: not engine.stats().running)
    engine._scheduler.call(lambda: None)  # by now the engine's thread has let go of what ran
    segments._thread.submit(lambda: None).result()  # and what was being written is given up
    wait_until(lambda: engine.store.files.segment_ids() == kept)
    wait_until(lambda: not segments._remover._left)
    stats, tiers = engine.stats(), engine._worker.memory.tiers
    assert stats.running == stats.pinned_packs == tiers.pinned_slots == 0
    known = [opened.prefix for opened in engine._worker.prefixes._known.values()]
    assert all(prefix == document for prefix in known)


def once(error: Exception, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of an object, the first call of which fails."""
    calls: list[object] = []

    def call(self: object, *args: object, **named: object) -> object:
        calls.append(self)
        if len(calls) == 1:
            raise error
        return method(self, *args, **named)

    return call


def without_segments(engine: Engine, **config: object) -> EngineConfig:
    return replace(engine.config, segment_tokens=0, **config)  # type: ignore[arg-type]


def test_at_a_budget_of_one_segments_change_no_token(engine: Engine, document: Prefix) -> None:
    requests = [asked(document, 1.0), asked(document, 1.0, 41), asked(document, 0.2)]
    with engine.variant(without_segments(engine)) as other:
        whole = other.generate(requests, SAMPLING, keep_kv=True).results()
    stream = engine.generate(requests, SAMPLING, keep_kv=True)
    parts = stream.results()
    more = SEGMENTS * SEGMENT // 16 - 1  # chunks; the document's last one is whole now
    assert [text.offloaded_chunks for text in stream._sequences] == [more, more, 0]
    for mine, theirs in zip(parts[:2], whole[:2], strict=True):
        assert (mine.trace.segments, theirs.trace.segments) == (SEGMENTS, 0)
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        kv = mine.completion().kv, theirs.completion().kv
        assert kv[0].shape == kv[1].shape and scale_error(*map(np.asarray, kv)) < TIGHT
    assert parts[2].trace.segments == SEGMENTS
    assert (np.asarray(parts[2].completion().kv) != np.asarray(whole[2].completion().kv)).any()
    settled(engine, document)


def test_scores_that_cannot_be_saved_change_no_token(
    engine: Engine, document: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text's own segments, as it ends. The disk is waited for once, not for each of them."""
    requests = [asked(document, budget) for budget in (1.0, 0.2)]
    healthy = engine.generate(requests, SAMPLING).results()
    fails = Mock(side_effect=StoreUnavailable("the disk has not answered"))
    monkeypatch.setattr(ChunkStore, "save_scores", fails)
    handles = [engine.submit(request, SAMPLING) for request in requests]
    for handle, theirs in zip(handles, healthy, strict=True):
        handle.result(60)
        mine = generation_of(handle)
        mine.raise_for_error()
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.trace.segments == SEGMENTS
    settled(engine, document)
    assert fails.call_count == len(requests)


@pytest.fixture(scope="module")
def plain(engine: Engine, document: Prefix) -> np.ndarray:
    """Keys and values that a text leaves."""
    [text] = engine.generate(asked(document, 0.2), SAMPLING, keep_kv=True).results()
    settled(engine, document)
    return np.asarray(text.completion().kv)


@pytest.fixture(scope="module")
def in_buffers(engine: Engine, document: Prefix) -> list[list[int]]:
    """What two texts say without segments."""
    requests = [asked(document, 0.2, seed) for seed in (40, 41)]
    with engine.variant(without_segments(engine)) as other:
        return [text.token_ids.tolist() for text in other.generate(requests, SAMPLING).results()]


@pytest.mark.parametrize(
    ("system", "config"),
    [
        ({"window": 1.0}, {"device_cache_bytes": 0}),
        (
            {"own": OwnParts(decoding=decoding(HoldNothing, keep=lru))},
            {"device_cache_bytes": 0, "host_cache_bytes": 0},
        ),
    ],
)
def test_what_is_kept_where_changes_no_bit(
    engine: Engine, document: Prefix, plain: np.ndarray, system: dict[str, object],
    config: dict[str, object],
) -> None:  # fmt: skip
    room = POOL_BYTES - int(str(config.get("device_cache_bytes", 2**20)))
    values = replace(
        engine.config,
        system=replace(engine.system, **system),
        **({"prefetch_device_bytes": room} | config),  # type: ignore[arg-type]
    )
    with engine.variant(values) as other:
        [mine] = other.generate(asked(document, 0.2), SAMPLING, keep_kv=True).results()
        settled(other, document)
    assert (np.asarray(mine.completion().kv) == plain).all()


def test_the_first_token_over_a_new_segment_selects(engine: Engine, document: Prefix) -> None:
    """Although of every 40 tokens only one does."""
    system = replace(engine.system, decode=replace(engine.system.decode, every=40))
    with engine.variant(replace(engine.config, system=system)) as other:
        [text] = other.generate(asked(document, 0.2), SAMPLING).results()
        settled(other, document)
    masses = np.array([token.attention_mass for token in text.trace.tokens])
    gaps = np.diff(np.flatnonzero(np.diff(masses, prepend=0.0)))  # a selection has one of its own
    assert text.trace.segments == SEGMENTS == (gaps < 40).sum()
    assert gaps.max() == 40


def test_a_long_text_needs_no_more_than_a_short_one(
    engine: Engine, document: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers, slots and programs, from its second segment on; but for calls that are compiled
    beside tokens, whenever many of them have found all their packs."""
    count, seen = 400, []
    monkeypatch.setattr("ckv_jax.decode.selection._TOKENS_BEFORE_COMPILING", count)
    sampling = SamplingParams(max_tokens=count)
    with engine.generate(asked(document, 0.2), sampling) as stream:
        for _ in stream:
            held, made = engine.stats().pinned_packs, engine._worker.layers.programs.made
            for batch in list(engine._worker.decoding.batches):
                seen.append((batch.decoder.capacity, held, made))
        [text] = stream.results()
    assert text.trace.segments >= (count - 128) // SEGMENT
    capacities, held, made = zip(*seen, strict=True)
    assert max(capacities) == rows_bucket(most_buffered(SEGMENT, 16))
    most = 2 * 2 * engine.layout.groups  # a fifth of 10 chunks, twice
    assert max(held) <= most
    assert made[len(made) // 2] == made[-1]
    settled(engine, document)


def test_a_text_that_is_given_up_leaves_nothing_behind(engine: Engine, document: Prefix) -> None:
    settled(engine, document)
    used = engine.store.usage()
    for after in (97, 140):  # about to move onto the first one, or standing on some
        with engine.generate(asked(document, 0.2), SamplingParams(max_tokens=ENDLESS)) as stream:
            for number, _ in enumerate(stream):
                if number == after:
                    break
            assert number == after
        settled(engine, document)
    wait_until(lambda: engine.store.usage() == used)


def test_nothing_that_was_generated_is_found_by_others(engine: Engine, document: Prefix) -> None:
    found = []
    with engine.generate(asked(document, 0.2), SamplingParams(max_tokens=ENDLESS)) as stream:
        text = [*document.tokens, *tokens(7, 40).tolist()]
        for event in stream:
            text.append(event.token_id)
            if len(text) in (300, 340):
                longest = engine.store.longest_prefix(
                    np.array(text), fingerprint=engine.fingerprint, layout=engine.layout
                )
                found.append(longest.num_tokens)
                mine = [p for p in engine.store.prefixes() if p.provenance.startswith("text:")]
                assert len(mine) == 1 and mine[0].num_tokens > document.num_tokens
                if len(found) == 2:
                    break
    assert found == [document.num_tokens] * 2
    settled(engine, document)


def private(store: ChunkStore, engine: Engine, document: Prefix, name: str) -> Prefix:
    """What a text of some process has stored."""
    layout = engine.layout
    with store.writer(
        fingerprint=engine.fingerprint, layout=layout, tokens=tokens(32, 7),
        parent=document.whole_chunks(), provenance=f"text:{name}",
    ) as writer:  # fmt: skip
        shape = (layout.num_layers, 2, 32, *layout.pack_shape[-2:])
        writer.write(0, np.zeros(shape, layout.numpy_dtype))
        return writer.commit()


def test_what_dead_processes_left_is_removed(engine: Engine, document: Prefix) -> None:
    sampling = SamplingParams(max_tokens=120)
    with ChunkStore.open(engine.store.files.root) as store:  # as another process has it
        living = private(store, engine, document, "living")
        private(store, engine, document, "dead")
        with store.reader(living) as reader, engine.variant(engine.config) as other:
            reader.require()
            other.generate(asked(document, 0.2), sampling).results()
            settled(other, document, living)
        with engine.variant(engine.config) as other:
            other.generate(asked(document, 0.2), sampling).results()
            settled(other, document)


def test_a_segment_that_is_read_is_removed_later(caplog: pytest.LogCaptureFixture) -> None:
    tried, read = [], {"a"}

    class Store:
        def remove_segment(self, segment: str) -> bool:
            tried.append(segment)
            return segment not in read

    left = SegmentRemover(Store())  # type: ignore[arg-type]
    left.add(["a"])
    wait_until(lambda: len(tried) > 2)
    read.clear()
    wait_until(lambda: not left._left)
    left.close()
    assert not caplog.records
    read.add("b")
    left = SegmentRemover(Store())  # type: ignore[arg-type]
    left.add(["b", "c"])
    left.close()
    assert "c" not in tried and "they are being read" in caplog.text


def test_a_segment_that_cannot_be_opened_is_left_and_fails_no_request(
    engine: Engine, document: Prefix, in_buffers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The store gives no answer as a text is to move onto what was written; another runs beside."""
    settled(engine, document)
    requests = [asked(document, 0.2, seed) for seed in (40, 41)]
    use = OpenPrefixes.use
    move = once(StoreUnavailable("locked"), use)

    def opened(self: OpenPrefixes, prefix: Prefix, room: int = 0, **named: Any) -> object:
        return (move if room else use)(self, prefix, room, **named)

    monkeypatch.setattr(OpenPrefixes, "use", opened)
    first, second = engine.generate(requests, SAMPLING).results()
    first.raise_for_error()
    second.raise_for_error()
    assert {first.trace.segments, second.trace.segments} == {0, 2}
    assert second.token_ids[:30].tolist() == in_buffers[1][:30]
    assert caplog.text.count("cannot store generated tokens, they stay in memory: locked") == 1
    settled(engine, document)


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (Index, "add", StoreUnavailable("locked")),  # its name is there by then
        (ChunkStore, "writer", StoreFull("no room")),
        (ChunkStore, "writer", MemoryError("no memory")),
        (ChunkStore, "prefixes", StoreUnavailable("locked")),  # the sweep is made again
    ],
)
def test_where_a_segment_cannot_be_stored_its_tokens_stay_in_memory(
    engine: Engine, document: Prefix, in_buffers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    owner: type, method: str, error: Exception,
) -> None:  # fmt: skip
    settled(engine, document)
    private(engine.store, engine, document, "dead")
    with engine.variant(engine.config) as other:
        monkeypatch.setattr(owner, method, once(error, getattr(owner, method)))
        [text] = other.generate(asked(document, 0.2), SAMPLING).results()
        assert text.token_ids.tolist() == in_buffers[0]
        assert text.trace.segments == 0
        assert f"cannot store generated tokens, they stay in memory: {error}" in caplog.text
        settled(other, document)


def test_a_segment_takes_no_new_thread(
    engine: Engine, document: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have none left."""
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name.startswith(("ckv-segment", "ckv-remover")):
            raise RuntimeError("can't start new thread")
        start(self)

    with engine.variant(engine.config) as other:
        monkeypatch.setattr(threading.Thread, "start", refused)
        [text] = other.generate(asked(document, 0.2), SAMPLING).results()
        assert text.trace.segments == SEGMENTS
        settled(other, document)
