"""Texts over grouped segments, some of which is lost: mended in place, and no token changes."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
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
from ckv_jax.storage import ChunkStore, Prefix, verify_store
from ckv_jax.storage.segment import alike
from ckv_jax.systems import SYSTEMS

TOKENS = tokens(250)
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


def ask(engine: Engine, prefix: Prefix, seeds: tuple[int, ...] = (40,)) -> list[Generation]:
    requests = [
        Request(prefix=prefix, suffix=tokens(7, seed).tolist(), budget=0.2) for seed in seeds
    ]
    texts = engine.generate(requests, SamplingParams(max_tokens=LENGTH), keep_kv=True).results()
    for text in texts:
        text.raise_for_error()
    return texts


def read(engine: Engine, prefix: Prefix) -> None:
    """All of it, so that what is bad is marked."""
    layout = prefix.layout
    out = np.empty((prefix.num_chunks, *layout.pack_shape), layout.numpy_dtype)
    with engine.store.reader(prefix) as reader:
        reader.lost_orders()
        for group in range(layout.groups):
            reader.read_packs(group, np.arange(prefix.num_chunks), out)


def recomputed(text: Generation) -> int:
    later = sum(token.recomputed for token in text.trace.tokens)
    return text.trace.counters.get("recomputed_packs", 0) + later


def written(folder: Path, prefix: Prefix) -> dict[str, bytes]:
    files = segment_folder(folder, prefix).rglob("c.*")
    return {str(path): path.read_bytes() for path in files}


def same(mine: Generation, theirs: Generation) -> None:
    assert mine.token_ids.tolist() == theirs.token_ids.tolist()
    kv = mine.completion().kv, theirs.completion().kv
    assert scale_error(*map(np.asarray, kv)) < TIGHT


@pytest.mark.parametrize("lost", ["pack", "assignment", "both"])
def test_it_is_repaired_in_place(engine: Engine, prefix: Prefix, tmp_path: Path, lost: str) -> None:
    before, [expected] = written(tmp_path, prefix), ask(engine, prefix)
    if lost != "assignment":
        flip_pack(tmp_path, prefix, 3, 5)
    if lost != "pack":
        flip_assignment(tmp_path, prefix, 3)
    assert not verify_store(engine.store).ok
    read(engine, prefix)
    told: list[tuple[int, int]] = []
    mended = engine.ingest(TOKENS, progress=lambda *done: told.append(done))
    assert [s.segment_id for s in mended.spans] == [s.segment_id for s in prefix.spans]
    assert mended.num_tokens == len(TOKENS) and len(told) == 1
    assert verify_store(engine.store).ok
    after = written(tmp_path, mended)
    differ = {path for path in before if before[path] != after[path]}
    assert all("/packs/" in path for path in differ)  # whose bits may differ, and nothing else
    same(ask(engine, mended)[0], expected)


@pytest.mark.parametrize("assignment", [False, True], ids=["pack", "pack and assignment"])
def test_a_pack_that_is_lost_while_texts_run_is_recomputed_and_no_token_changes(
    engine: Engine, prefix: Prefix, tmp_path: Path, assignment: bool
) -> None:
    """The files are hurt when the first tokens are out; another text stands on something else."""
    other = engine.ingest(tokens(230, 1))
    expected = [*ask(engine, prefix), *ask(engine, other)]
    requests = [
        Request(prefix=which, suffix=tokens(7, 40).tolist(), budget=0.2)
        for which in (prefix, other)
    ]
    with engine.generate(requests, SamplingParams(max_tokens=LENGTH), keep_kv=True) as stream:
        for _ in range(4):
            next(stream)
        for group in range(prefix.layout.groups):
            for chunk in range(prefix.num_chunks):
                flip_pack(tmp_path, prefix, group, chunk)
            if assignment:
                flip_assignment(tmp_path, prefix, group)
        texts = stream.results()
    for mine, theirs in zip(texts, expected, strict=True):
        mine.raise_for_error()
        same(mine, theirs)
    assert recomputed(texts[0]) > 0
    read(engine, prefix)
    mended = engine.ingest(TOKENS)
    assert mended.num_tokens == len(TOKENS) and verify_store(engine.store).ok
    same(ask(engine, mended)[0], expected[0])


def test_it_is_repaired_while_a_generation_reads_it(
    engine: Engine, prefix: Prefix, tmp_path: Path
) -> None:
    [expected] = ask(engine, prefix)
    request = Request(prefix=prefix, suffix=tokens(7, 40).tolist(), budget=0.2)
    with engine.generate(request, SamplingParams(max_tokens=LENGTH), keep_kv=True) as stream:
        next(stream)
        for chunk in range(prefix.num_chunks):
            flip_pack(tmp_path, prefix, 2, chunk)
        read(engine, prefix)
        assert engine.ingest(TOKENS).num_tokens == len(TOKENS)
        [text] = stream.results()
    same(text, expected)
    assert verify_store(engine.store).ok


def test_a_generation_over_what_is_there_keeps_its_order_in_the_store(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens alone do not tell it: another process cannot remove the prefix meanwhile."""
    with sharp.fresh(tmp_path, system=SYSTEMS["kvdrive"]) as engine:
        prefix, begin, freed = engine.ingest(TOKENS), Worker.first_tokens, list[int]()
        for _ in range(2):
            [expected] = ask(engine, prefix)

        def begun(self: Worker, batch: list[Sequence]) -> None:
            begin(self, batch)
            freed.append(other.delete(prefix))
            self.memory.tiers.let_go(self.prefixes.known(prefix).all_pages())

        monkeypatch.setattr(Worker, "first_tokens", begun)
        with ChunkStore.open(tmp_path) as other:
            [text] = ask(engine, prefix)
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
            [expected] = ask(engine, prefix)

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
            [text] = ask(engine, prefix)
            assert not any(freed)
            assert other.delete(prefix) > 0
        same(text, expected)


def test_tokens_that_are_grouped_otherwise_when_stored_again_have_other_packs(
    sharp: Sharp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the packs of the first grouping are still in memory."""
    with sharp.fresh(tmp_path, system=SYSTEMS["kvdrive"]) as engine:
        first = engine.ingest(TOKENS)
        asked = Request(prefix=first, suffix=tokens(7, 40).tolist(), budget=0.5)
        engine.reprefill([asked])[0].raise_for_error()
        engine.store.delete(first)
        real = alike.alike
        monkeypatch.setattr(alike, "alike", lambda keys, size: real(keys, size)[::-1])
        again = engine.ingest(TOKENS)
        assert again.id == first.id and again.spans != first.spans
        asked = Request(prefix=again, suffix=asked.suffix, budget=1.0)
        [result] = engine.reprefill([asked])
        dense = engine.recompute(asked)
        assert scale_error(np.asarray(result.logits), np.asarray(dense.logits)) < TIGHT
