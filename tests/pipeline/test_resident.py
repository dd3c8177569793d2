"""Packs looked up on the device: the same answers as where the host waits for every selection."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from compilations import compilations
from engine_support import CHUNKED, SMALL, TIGHT, scale_error, small_engine, tokens
from segment_support import hurt, segment_folder

from ckv_jax import Engine, Generation, Request, Result, SamplingParams
from ckv_jax.decode.selection import DecodeSelection
from ckv_jax.decode.window import Window
from ckv_jax.pipeline.executor import Executor, FirstToken
from ckv_jax.pipeline.programs import Program, signature
from ckv_jax.pipeline.resident import Looked
from ckv_jax.prefix.packs import Packs
from ckv_jax.selection.select import Coarse, Select
from ckv_jax.storage.chain import EXACT
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore

MODEL = dataclasses.replace(SMALL, num_layers=6)
PERIODS = 3
SYSTEM = dataclasses.replace(CHUNKED, period=2, subperiod=2, pack_layers=2)
TWO_STEPS = dataclasses.replace(SYSTEM, subperiod=1, pack_layers=1)
OFTEN_KEPT = dataclasses.replace(
    SYSTEM, decode=Select(score_layers=3, queries=4, coarse=Coarse(survivors=4), every=2)
)


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    system = getattr(request, "param", SYSTEM)
    with small_engine(tmp_path, system=system, model=MODEL, device_cache_bytes=8 << 20) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["calls of its parts", "one call"])
def fused(
    request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Runs periods as calls of their parts, and as one call, as on an accelerator. Returns the
    numbers of those that were one call."""
    found, resident = list[int](), engine.worker.runtime.resident
    real = resident.period

    def period(number: int, *args: Any, **more: bool) -> Looked | None:
        looked = real(number, *args, **more)
        found.extend([number] if looked is not None else [])
        return looked

    monkeypatch.setattr(resident, "fuses", request.param)
    monkeypatch.setattr(resident, "period", period)
    return found


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The periods for whose selection the host has waited, of requests and of tokens."""
    found: list[int] = []
    run, select = Executor._run_period, DecodeSelection.select

    def run_period(self: Executor, run_of: object, number: int) -> None:
        found.append(number)
        run(self, run_of, number)  # type: ignore[arg-type]

    def select_for(self: DecodeSelection, period: int, *args: object) -> np.ndarray:
        found.append(period)
        return select(self, period, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("ckv_jax.decode.selection._TOKENS_BEFORE_COMPILING", 1)
    monkeypatch.setattr(Executor, "_run_period", run_period)
    monkeypatch.setattr(DecodeSelection, "select", select_for)
    return found


def ask(engine: Engine, prefix: Prefix, rows: int = 1, seed: int = 1) -> list[Result]:
    suffixes = [tokens(20, seed + row) for row in range(rows)]
    requests = [Request(prefix=prefix, suffix=suffix, budget=0.2) for suffix in suffixes]
    results = engine.reprefill(requests)
    for result in results:
        result.raise_for_error()
    engine.settle()
    return results


def write(engine: Engine, prefix: Prefix, rows: int = 1, **more: Any) -> list[Generation]:
    """Each row samples by a seed of its own; `more`: fields of its `SamplingParams`."""
    requests = [Request(prefix=prefix, suffix=tokens(9, row), budget=0.2) for row in range(rows)]
    sampling = [
        SamplingParams(max_tokens=10, temperature=0.8, seed=row, **more) for row in range(rows)
    ]
    made = engine.generate(requests, sampling, keep_kv=True).results()
    for generation in made:
        generation.raise_for_error()
    engine.settle()
    return made


def not_compiled(engine: Engine) -> None:
    """Lets the calls of tokens go, which engines of one model share."""
    engine.settle()
    selections = engine.worker.decoding.selections
    assert selections is not None
    selections.context.token._token.let_go()


def forget(engine: Engine, prefix: Prefix, group: int) -> None:
    """Takes all packs of a layer group out of memory."""
    opened = engine._worker.prefixes.known(prefix)
    pages = opened.pages(group, np.arange(opened.num_chunks))
    assert engine._worker.memory.tiers.let_go(pages)


def emptied(monkeypatch: pytest.MonkeyPatch, group: int) -> list[bool]:
    """Takes all packs of a layer group out of memory before every token; whether each token is
    tried as if all were there."""
    begin, tried = DecodeSelection.begin, list[bool]()

    def begun(self: DecodeSelection, batch: int) -> None:
        begin(self, batch)
        self._found_all = 1  # as if the token before had
        tried.append(self.finds_all(batch))
        opened = self._by_prefix[0].opened
        self._tiers.let_go(opened.pages(group, np.arange(opened.num_chunks)))

    monkeypatch.setattr(DecodeSelection, "begin", begun)
    return tried


@pytest.mark.parametrize("engine", [SYSTEM, TWO_STEPS], ids=["", "two steps"], indirect=True)
def test_a_request_over_what_is_there_waits_for_no_selection(
    engine: Engine, fused: list[int], waited: list[int]
) -> None:
    prefix, rows = engine.ingest(tokens(700)), 3
    first = ask(engine, prefix, rows)
    assert waited == [*range(PERIODS)]
    second = ask(engine, prefix, rows)  # finds everything
    assert not fused
    waited.clear()
    compiled = compilations()
    for _ in range(2):
        for mine, read, known in zip(ask(engine, prefix, rows), first, second, strict=True):
            assert np.array_equal(mine.logits, read.logits)
            assert mine.trace.period_chunks == read.trace.period_chunks
            assert mine.trace.attention_mass == read.trace.attention_mass
            assert mine.trace.bytes == known.trace.bytes and not mine.trace.bytes["ssd"]
            assert mine.trace.breakdown_ms["compute"] > 0
    assert not waited and compilations() == compiled
    assert fused == (2 * [*range(PERIODS)] if engine.worker.runtime.resident.fuses else [])


@pytest.mark.parametrize("group", [0, PERIODS - 1])
def test_the_host_reads_on_from_the_first_period_that_lacks_a_pack(
    engine: Engine, fused: list[int], waited: list[int], group: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    prefix = engine.ingest(tokens(700))
    [[expected], _, _] = [ask(engine, prefix) for _ in range(3)]
    waited.clear()
    fused.clear()
    forget(engine, prefix, group)
    ahead: list[int] = []
    real = Packs.ahead
    monkeypatch.setattr(
        Packs, "ahead", lambda self, which, of, ids: (ahead.append(of), real(self, which, of, ids))
    )
    [found] = ask(engine, prefix)
    assert waited == [*range(group, PERIODS)]
    assert fused == ([*range(PERIODS)] if engine.worker.runtime.resident.fuses else [])
    assert ahead == [group + 1][: PERIODS - 1 - group]  # after the miss alone
    assert np.array_equal(found.logits, expected.logits)
    assert found.trace.period_chunks == expected.trace.period_chunks
    read = found.trace.period_chunks[group] * prefix.layout.group_bytes(group)
    assert found.trace.bytes["ssd"] - found.trace.bytes["unused"] == read
    waited.clear()
    ask(engine, prefix)
    assert waited == [*range(PERIODS)], "the request before did not find everything"


@pytest.mark.parametrize("fused", [True], indirect=True)
def test_calls_of_periods_that_are_let_go_are_compiled_again(
    engine: Engine, fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, answered = engine.ingest(tokens(700)), threading.Event()
    [[expected], _, _] = [ask(engine, prefix) for _ in range(3)]
    assert fused == [*range(PERIODS)]
    engine.worker.runtime.resident._period.let_go()
    compile_ = Program.compile

    def slowly(self: Program, *args: Any, **named: Any) -> bool:
        assert answered.wait(60)
        return compile_(self, *args, **named)

    monkeypatch.setattr(Program, "compile", slowly)
    request = Request(prefix=prefix, suffix=tokens(20, 1), budget=0.2)
    [of_parts] = engine.reprefill([request])
    assert fused == [*range(PERIODS)]
    answered.set()
    engine.settle()
    [of_one_call] = ask(engine, prefix)
    assert fused == 2 * [*range(PERIODS)]
    for found in (of_parts, of_one_call):
        assert np.array_equal(found.logits, expected.logits)


@pytest.mark.parametrize("fused", [True], indirect=True)
def test_calls_of_periods_over_the_keys_of_a_lost_digest_are_compiled_beside_requests(
    engine: Engine, fused: list[int], tmp_path: Path
) -> None:
    prefix = engine.ingest(tokens(700))
    for _ in range(3):
        ask(engine, prefix)
    assert fused == [*range(PERIODS)]
    for path in segment_folder(tmp_path, prefix).glob("digest/c*"):
        hurt(path, 9)
    engine.worker.prefixes.known(prefix).digest = None
    [of_parts] = ask(engine, prefix)
    assert of_parts.trace.counters["recomputed_probes"] and fused == [*range(PERIODS)]
    ask(engine, prefix)  # keys select other packs
    [of_one_call] = ask(engine, prefix)
    assert fused == 2 * [*range(PERIODS)]
    assert scale_error(of_one_call.logits, of_parts.logits) < TIGHT


@pytest.mark.parametrize("fused", [True], indirect=True)
def test_a_warm_up_compiles_the_calls_of_periods(engine: Engine, fused: list[int]) -> None:
    prefix = engine.ingest(tokens(700))
    engine.worker.runtime.resident._period.let_go()
    engine.warmup(prefix, min_suffix=20, max_suffix=20, budgets=[0.2])
    compiled = compilations()
    for _ in range(3):
        ask(engine, prefix)
    assert compilations() == compiled
    assert fused[-PERIODS:] == [*range(PERIODS)]


@pytest.mark.parametrize("fused", [True], indirect=True)
def test_requests_do_without_a_call_that_does_not_compile(
    engine: Engine, fused: list[int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    prefix = engine.ingest(tokens(700))
    engine.worker.runtime.resident._period.let_go()  # engines of one model share them
    monkeypatch.setattr(Program, "compile", Mock(side_effect=MemoryError("no room for a program")))
    [[expected], *others] = [ask(engine, prefix) for _ in range(4)]
    assert all(np.array_equal(found.logits, expected.logits) for [found] in others)
    assert not fused
    assert len(caplog.messages) == len(engine.worker.runtime.background._begun) > 0
    assert all("MemoryError: no room for a program" in said for said in caplog.messages)


def test_use_is_recorded_as_where_the_host_waits(
    engine: Engine, fused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = engine.ingest(tokens(700))
    opened, tiers = engine._worker.prefixes.known(prefix), engine._worker.memory.tiers

    def gained() -> tuple[np.ndarray, np.ndarray]:
        before = [part.copy() for part in tiers.history(opened.all_pages())]
        ask(engine, prefix)
        after = tiers.history(opened.all_pages())
        return after[0] - before[0], after[1] - before[1]

    ask(engine, prefix)
    importance, frequency = gained()
    for looks_up in (True, False):
        monkeypatch.setattr(Executor, "looks_up", looks_up)
        again = gained()
        np.testing.assert_allclose(again[0], importance, rtol=1e-6)
        assert np.array_equal(again[1], frequency) and frequency.any()
    assert bool(fused) == engine.worker.runtime.resident.fuses


@pytest.mark.parametrize(
    "engine", [SYSTEM, OFTEN_KEPT], ids=["every token", "every second one"], indirect=True
)
def test_tokens_over_what_is_there_wait_for_no_selection(
    engine: Engine, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled with the rest, or by itself where some ids are barred."""
    prefix, rows = engine.ingest(tokens(700)), 3
    barred = {"min_tokens": 10, "stop_token_ids": tuple(range(0, SMALL.vocab_size, 2))}
    for _ in range(2):  # reads, then finds all and compiles
        write(engine, prefix, rows)
    waited.clear()
    mine = write(engine, prefix, rows)
    looked_up = len(waited)
    mine += write(engine, prefix, rows, **barred)
    monkeypatch.setattr(DecodeSelection, "looks_up", False)
    waited.clear()
    theirs = write(engine, prefix, rows)
    assert looked_up < len(waited)
    theirs += write(engine, prefix, rows, **barred)
    for one, other in zip(mine, theirs, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.completion().kv, other.completion().kv)
        assert [t.attention_mass for t in one.trace.tokens] == [
            t.attention_mass for t in other.trace.tokens
        ]


def test_tokens_go_on_while_their_calls_are_compiled(
    engine: Engine, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, held, threads = engine.ingest(tokens(700)), threading.Event(), set()
    not_compiled(engine)
    compile_ = Program.compile

    def slowly(self: Program, *args: Any, **named: Any) -> bool:
        threads.add(threading.current_thread().name)
        assert held.wait(60)
        return compile_(self, *args, **named)

    def texts() -> list[Generation]:  # of more rows than what is warmed up
        requests = [Request(prefix=prefix, suffix=tokens(9, row), budget=0.2) for row in range(2)]
        return engine.generate(requests, SamplingParams(max_tokens=10)).results()

    monkeypatch.setattr(Program, "compile", slowly)
    made = [texts(), texts()]
    held.set()
    engine.settle()
    waited.clear()
    compiled = compilations()
    made.append(texts())
    assert compilations() == compiled and waited == [*range(PERIODS)]  # of one token
    assert threads == {"ckv-compile_0"}
    for mine in made:
        for one, other in zip(mine, made[0], strict=True):
            one.raise_for_error()
            assert np.array_equal(one.token_ids, other.token_ids)


def test_calls_of_tokens_that_were_let_go_are_compiled_again(
    engine: Engine, waited: list[int]
) -> None:
    """Also those that a warm-up has compiled."""
    prefix = engine.ingest(tokens(700))
    engine.warmup(prefix, max_batch=2, max_suffix=9, budgets=[0.2], max_tokens=10)
    for _ in range(2):
        write(engine, prefix, 2)
    waited.clear()
    write(engine, prefix, 2)
    in_few_calls = len(waited)
    not_compiled(engine)
    for expected in (False, True):
        waited.clear()
        write(engine, prefix, 2)
        assert (len(waited) == in_few_calls) == expected


def test_tokens_do_without_a_call_that_does_not_compile(
    engine: Engine, waited: list[int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    prefix, tried = engine.ingest(tokens(700)), list[object]()
    not_compiled(engine)

    def fails(self: Program, *args: Any, **named: Any) -> bool:
        tried.append(signature(args, named))
        raise MemoryError("no room for a program")

    monkeypatch.setattr(Program, "compile", fails)
    made = [write(engine, prefix, 2) for _ in range(3)]
    assert len(tried) == len({*tried}) == len(caplog.messages) > 0
    assert all("MemoryError: no room for a program" in said for said in caplog.messages)
    for mine in made:
        for one, other in zip(mine, made[0], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)


@pytest.mark.parametrize("engine", [TWO_STEPS], ids=["two steps"], indirect=True)
def test_a_token_reads_on_from_the_first_period_that_lacks_a_pack(
    engine: Engine, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows keep their packs; others are taken away before every token, those of
    a period's second step."""
    prefix = engine.ingest(tokens(700))
    monkeypatch.setattr(DecodeSelection, "looks_up", False)
    [expected] = write(engine, prefix)
    monkeypatch.setattr(DecodeSelection, "looks_up", True)
    tried = emptied(monkeypatch, 3)
    write(engine, prefix)  # compiles
    waited.clear()
    tried.clear()
    [found] = write(engine, prefix)
    assert all(tried) and len(tried) == 10
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert np.array_equal(found.completion().kv, expected.completion().kv)
    reads = [token.ssd_reads for token in found.trace.tokens]
    assert sum(reads) > 0 and 1 in waited and 0 not in waited[PERIODS:]


@pytest.mark.slow
def test_what_a_request_found_stays_while_it_reads_the_rest(
    engine: Engine, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packs are held for the generation, however little they are worth."""
    prefix, dear = engine.ingest(tokens(700)), engine.ingest(tokens(700, 9))
    for _ in range(5):
        ask(engine, dear)
    write(engine, prefix)
    write(engine, prefix)
    held, select = [], Window.select

    def selected(self: Window, selection: int, ids: np.ndarray) -> None:
        held.append(self.held)
        select(self, selection, ids)

    monkeypatch.setattr(Window, "select", selected)
    forget(engine, prefix, PERIODS - 1)
    tiers = engine._worker.memory.tiers
    lent = tiers.take(tiers.device.free - 2)
    waited.clear()
    write(engine, prefix)
    tiers.release(lent)
    assert waited[0] == PERIODS - 1 and held == [True] * PERIODS


def test_what_the_store_cannot_give_is_computed_again(
    engine: Engine, waited: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request, then a token, whose first periods are on the device: it is tried once more."""
    prefix = engine.ingest(tokens(700))
    [[expected], _] = [ask(engine, prefix) for _ in range(2)]
    [text] = [write(engine, prefix)[0] for _ in range(2)][1:]
    shard = sorted(segment_folder(tmp_path, prefix).glob("packs/c.1.*"))[0]
    for pack in range(prefix.num_chunks):
        hurt(shard, pack * prefix.layout.pack_bytes + 9)
    forget(engine, prefix, 1)
    waited.clear()
    [found] = ask(engine, prefix)
    assert waited[0] == 1 and waited.count(1) == 2
    assert scale_error(found.logits, expected.logits) < TIGHT
    emptied(monkeypatch, 1)
    [again] = write(engine, prefix)
    assert np.array_equal(again.token_ids, text.token_ids)
    assert scale_error(again.completion().kv, text.completion().kv) < TIGHT
    assert engine.stats().pinned_packs == 0


def openings(monkeypatch: pytest.MonkeyPatch) -> list[Prefix]:
    """The prefixes whose segments any store opens."""
    found, open_segments = list[Prefix](), ChunkStore._opened

    def noted(self: ChunkStore, prefix: Prefix) -> Any:
        found.append(prefix)
        return open_segments(self, prefix)

    monkeypatch.setattr(ChunkStore, "_opened", noted)
    return found


def test_a_generation_over_what_is_there_opens_nothing(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own engine keeps the prefix. Another process may remove it: what leaves the device is
    computed again."""
    prefix, opened = engine.ingest(tokens(700)), openings(monkeypatch)
    [first] = write(engine, prefix)
    opened.clear()
    for mine in (*write(engine, prefix), *write(engine, prefix)):
        assert np.array_equal(mine.token_ids, first.token_ids)
    assert not opened
    begin, freed, other = DecodeSelection.begin, list[int](), ChunkStore.open(tmp_path)
    run = engine.worker.executor.run

    def ran(*args: Any, **named: Any) -> FirstToken:
        freed.append(engine.store.delete(prefix))
        return run(*args, **named)

    def begun(self: DecodeSelection, batch: int) -> None:
        begin(self, batch)
        if len(freed) == 1:
            freed.extend([engine.store.delete(prefix), engine.store.evict_to(0)])
            freed.append(other.delete(prefix))
        self._tiers.let_go(self._by_prefix[0].opened.all_pages())

    monkeypatch.setattr(engine.worker.executor, "run", ran)
    monkeypatch.setattr(DecodeSelection, "begin", begun)
    with other:
        [last] = write(engine, prefix)
    assert freed[:3] == [0, 0, 0] and freed[3] > 0
    assert opened and not engine.store.prefixes()
    assert np.array_equal(last.token_ids, first.token_ids)
    assert scale_error(last.completion().kv, first.completion().kv) < TIGHT


@pytest.mark.parametrize(
    "engine",
    [SYSTEM, dataclasses.replace(SYSTEM, codec="int8")],
    ids=["turn", "int8"],
    indirect=True,
)
def test_a_generation_over_approximate_kv_holds_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model alone would compute other KV."""
    prefix, opened = engine.ingest(tokens(700)), openings(monkeypatch)
    if engine.system.coder is None:
        [turn] = write(engine, prefix)
        prefix = engine.append(turn, exact=False)
        assert prefix.provenance != EXACT
    for _ in range(3):
        opened.clear()
        write(engine, prefix)
    assert opened == [prefix]


def test_maps_of_packs_stay_while_others_take_turns(engine: Engine) -> None:
    resident = engine.worker.runtime.resident
    opened = engine.worker.prefixes.known(engine.ingest(tokens(700)))
    first, *maps = [resident.map([opened] * count, 8) for count in range(1, 10)]
    for count, one in enumerate(maps, 2):
        assert resident.map([opened] * count, 8) is one
    assert resident.map([opened], 8) is not first


def test_equal_small_arrays_are_uploaded_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = engine.layers
    given = {
        "one": np.int32(3),
        "two": np.array([3], np.int32),
        "three": np.array([3.0], np.float32),
    }
    assert layers.put_common(given) is given  # a CPU takes them as they are
    monkeypatch.setattr(layers, "_places", True)
    first, second = (
        layers.put_common(given),
        layers.put_common({k: v.copy() for k, v in given.items()}),
    )
    for name, array in given.items():
        assert first[name] is second[name]
        assert (first[name].dtype, first[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(first[name], array)
