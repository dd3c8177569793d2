"""Texts over grouped segments, some of which is lost: stored again, and no token is wrong."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from engine_sharp import COLD, Sharp
from engine_support import TIGHT, scale_error, tokens
from segment_support import failing, hurt, segment_folder

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.request import Generation
from ckv_jax.serving.decode_batch import DecodeBatches
from ckv_jax.serving.jobs import Job
from ckv_jax.serving.sequence import Sequence
from ckv_jax.serving.worker import Worker
from ckv_jax.storage import ChunkStore, Prefix, SegmentDamaged, verify_store
from ckv_jax.storage.segment import alike
from ckv_jax.systems import SYSTEMS

TOKENS = tokens(250)
SUFFIX = tokens(7, 40).tolist()
LENGTH = 20


@pytest.fixture
def engine(sharp: Sharp, tmp_path: Path) -> Iterator[Engine]:
    with sharp.fresh(tmp_path, system=SYSTEMS["kvdrive"], **COLD) as made:
        yield made


@pytest.fixture
def prefix(engine: Engine) -> Prefix:
    return engine.ingest(TOKENS)


def flip_pack(folder: Path, prefix: Prefix, group: int, chunk: int) -> None:
    layout = prefix.layout
    shard, row = divmod(group, layout.shard_groups)
    path = sorted(segment_folder(folder, prefix).glob("packs/c.*"))[shard]
    hurt(path, (row * prefix.num_chunks + chunk) * layout.pack_bytes + 9)


def flip_assignment(folder: Path, prefix: Prefix, group: int) -> None:
    (path,) = segment_folder(folder, prefix).glob("assignment/c.*")
    hurt(path, 2 * prefix.num_tokens * group + 40)


def flip_all(folder: Path, prefix: Prefix, *, assignment: bool) -> None:
    for group in range(prefix.layout.groups):
        for chunk in range(prefix.num_chunks):
            flip_pack(folder, prefix, group, chunk)
        if assignment:
            flip_assignment(folder, prefix, group)


def asked(prefix: Prefix) -> Request:
    return Request(prefix=prefix, suffix=SUFFIX, budget=0.2)


def ask(engine: Engine, prefix: Prefix) -> Generation:
    return answer(engine, asked(prefix))


def answer(engine: Engine, request: Request) -> Generation:
    sampling = SamplingParams(max_tokens=LENGTH)
    [text] = engine.generate(request, sampling, keep_kv=True).results()
    text.raise_for_error()
    return text


def read(engine: Engine, prefix: Prefix) -> None:
    """All of it, so that what is bad is marked."""
    layout = prefix.layout
    out = np.empty((prefix.num_chunks, *layout.pack_shape), layout.numpy_dtype)
    with engine.store.reader(prefix) as reader:
        with suppress(SegmentDamaged):
            _ = reader.order
        for group in range(layout.groups):
            reader.read_packs(group, np.arange(prefix.num_chunks), out)


def recomputed(text: Generation) -> int:
    later = sum(token.recomputed for token in text.trace.tokens)
    return text.trace.counters.get("recomputed_packs", 0) + later


def same(mine: Generation, theirs: Generation) -> None:
    assert mine.token_ids.tolist() == theirs.token_ids.tolist()
    kv = mine.completion().kv, theirs.completion().kv
    assert scale_error(*map(np.asarray, kv)) < TIGHT


@pytest.mark.parametrize("lost", ["pack", "assignment", "both"])
def test_it_is_stored_again_in_its_place(
    engine: Engine, prefix: Prefix, tmp_path: Path, lost: str
) -> None:
    expected = ask(engine, prefix)
    if lost != "assignment":
        flip_pack(tmp_path, prefix, 3, 5)
    if lost != "pack":
        flip_assignment(tmp_path, prefix, 3)
    assert not verify_store(engine.store).ok
    read(engine, prefix)
    again = engine.ingest(TOKENS)
    assert again.num_tokens == len(TOKENS)
    assert [s.segment_id for s in again.spans] == [s.segment_id for s in prefix.spans]
    assert verify_store(engine.store).ok
    same(ask(engine, again), expected)


def test_a_digest_alone_is_made_again_in_place(
    engine: Engine, prefix: Prefix, tmp_path: Path
) -> None:
    expected = ask(engine, prefix)
    (path,) = segment_folder(tmp_path, prefix).glob("digest/c.*")
    hurt(path, 9)
    with engine.store.reader(prefix) as reader:
        assert reader.read_digest() is None
    told: list[tuple[int, int]] = []
    again = engine.ingest(TOKENS, progress=lambda *done: told.append(done))
    assert again.num_tokens == len(TOKENS) and not told
    assert verify_store(engine.store).ok
    same(ask(engine, again), expected)


def test_a_pack_that_is_lost_while_texts_run_is_recomputed_and_no_token_changes(
    engine: Engine, prefix: Prefix, tmp_path: Path
) -> None:
    """The files are hurt when the first tokens are out; another text stands on something else."""
    other = engine.ingest(tokens(230, 1))
    expected = [ask(engine, prefix), ask(engine, other)]
    both = [asked(prefix), asked(other)]
    with engine.generate(both, SamplingParams(max_tokens=LENGTH), keep_kv=True) as stream:
        for _ in range(4):
            next(stream)
        flip_all(tmp_path, prefix, assignment=False)
        texts = stream.results()
    for mine, theirs in zip(texts, expected, strict=True):
        mine.raise_for_error()
        same(mine, theirs)
    assert recomputed(texts[0]) > 0
    read(engine, prefix)
    again = engine.ingest(TOKENS)
    assert again.num_tokens == len(TOKENS) and verify_store(engine.store).ok
    same(ask(engine, again), expected[0])


def test_a_text_whose_packs_and_assignment_are_lost_ends_and_the_next_one_is_computed(
    engine: Engine, prefix: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = engine.ingest(tokens(230, 1))
    whole = answer(engine, Request(prefix=[], suffix=[*TOKENS.tolist(), *SUFFIX]))
    expected = [ask(engine, prefix), ask(engine, other)]
    step, lost = DecodeBatches.step, list[Prefix]()

    def stepped(self: DecodeBatches) -> list[Job]:
        if self.batches and not lost:
            flip_all(tmp_path, prefix, assignment=True)
            lost.append(prefix)
        return step(self)

    monkeypatch.setattr(DecodeBatches, "step", stepped)
    both = [asked(prefix), asked(other)]
    with engine.generate(both, SamplingParams(max_tokens=LENGTH)) as stream:
        events = [event for event in stream if event.token_id is not None]
        texts = stream.results()
    assert isinstance(texts[0].error, SegmentDamaged)
    assert texts[1].error is None or isinstance(texts[1].error, SegmentDamaged)  # of its batch
    for index, text in enumerate(expected):
        found = [event.token_id for event in events if event.index == index]
        assert found == text.token_ids.tolist()[: len(found)]
    assert engine.stats().pinned_packs == engine.stats().running == 0
    again = ask(engine, prefix)  # of which nothing is stored by now
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    stored = engine.ingest(TOKENS)
    assert stored.num_tokens == len(TOKENS) and verify_store(engine.store).ok
    same(ask(engine, stored), expected[0])


def test_no_token_is_wrong_where_it_is_stored_again_while_a_generation_reads_it(
    engine: Engine, prefix: Prefix, tmp_path: Path
) -> None:
    expected = ask(engine, prefix)
    sampling = SamplingParams(max_tokens=LENGTH)
    with engine.generate(asked(prefix), sampling, keep_kv=True) as stream:
        next(stream)
        for chunk in range(prefix.num_chunks):
            flip_pack(tmp_path, prefix, 2, chunk)
        read(engine, prefix)
        assert engine.ingest(TOKENS).num_tokens == len(TOKENS)
        [text] = stream.results()
    if text.error is None:
        same(text, expected)
    else:  # its keys, computed again, made other groups
        assert isinstance(text.error, SegmentDamaged)
    assert verify_store(engine.store).ok


def test_a_generation_over_what_is_there_keeps_its_order_in_the_store(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens alone do not tell it: another process cannot remove the prefix meanwhile."""
    with sharp.fresh(tmp_path, system=SYSTEMS["kvdrive"]) as engine:
        prefix, begin, freed = engine.ingest(TOKENS), Worker.first_tokens, list[int]()
        for _ in range(2):
            expected = ask(engine, prefix)

        def begun(self: Worker, batch: list[Sequence]) -> None:
            begin(self, batch)
            freed.append(other.delete(prefix))
            self.memory.tiers.let_go(self.prefixes.known(prefix).all_pages())

        monkeypatch.setattr(Worker, "first_tokens", begun)
        with ChunkStore.open(tmp_path) as other:
            text = ask(engine, prefix)
            assert freed == [0]
            assert other.delete(prefix) > 0
        same(text, expected)


def test_a_generation_holds_later_what_could_not_be_opened_at_its_start(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its packs are in memory, so that no read opens the segments either."""
    with sharp.fresh(tmp_path, system=SYSTEMS["kvdrive"]) as engine:
        prefix, begin, freed = engine.ingest(TOKENS), Worker.first_tokens, list[int]()
        step = DecodeBatches.step
        for _ in range(2):
            expected = ask(engine, prefix)

        def begun(self: Worker, batch: list[Sequence]) -> None:
            with failing(monkeypatch, "lstat", errno.EIO) as calls:
                begin(self, batch)
            assert calls[0]

        def stepped(self: DecodeBatches) -> list[Job]:
            again = engine.worker.prefixes.known(prefix).hold_at
            if not freed:
                time.sleep(max(0.0, again - time.monotonic()))
            jobs = step(self)
            freed.append(other.delete(prefix) if self.batches else 0)
            return jobs

        monkeypatch.setattr(Worker, "first_tokens", begun)
        monkeypatch.setattr(DecodeBatches, "step", stepped)
        with ChunkStore.open(tmp_path) as other:
            text = ask(engine, prefix)
            assert not any(freed)
            assert other.delete(prefix) > 0
        same(text, expected)


def test_tokens_that_are_grouped_otherwise_when_stored_again_have_other_packs(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the packs of the first grouping are still in memory."""
    with sharp.fresh(tmp_path, system=SYSTEMS["kvdrive"]) as engine:
        first = engine.ingest(TOKENS)
        request = Request(prefix=first, suffix=SUFFIX, budget=0.5)
        engine.reprefill([request])[0].raise_for_error()
        engine.store.delete(first)
        real = alike.alike
        monkeypatch.setattr(alike, "alike", lambda keys, size: real(keys, size)[::-1])
        again = engine.ingest(TOKENS)
        assert again.id == first.id and again.spans != first.spans
        request = Request(prefix=again, suffix=SUFFIX, budget=1.0)
        [result] = engine.reprefill([request])
        dense = engine.recompute(request)
        assert scale_error(np.asarray(result.logits), np.asarray(dense.logits)) < TIGHT
