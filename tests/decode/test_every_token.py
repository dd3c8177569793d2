"""Every token selects anew: what it attends to depends on nothing but the text's own queries."""

from __future__ import annotations

import dataclasses
import math
import time
from functools import partial

import numpy as np
import pytest
from engine_sharp import COLD, POOL_BYTES
from engine_support import TIGHT, kept_kv, scale_error, tokens
from pipeline_support import UnsteadyStore

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.baselines.decoding import Guessed, HoldNothing, SelectFirst, decoding, lfu, lru
from ckv_jax.baselines.kvdrive import NearMisses
from ckv_jax.baselines.solidattention import ReadBefore
from ckv_jax.config import OwnParts, SystemConfig
from ckv_jax.decode.selection import DecodeSelection
from ckv_jax.decode.window import Keep, lookahead
from ckv_jax.selection.select import Select
from ckv_jax.storage.prefix import Prefix

BUDGET = 0.2
LENGTH = 16
COLD_CACHES: dict[str, object] = {"device_cache_bytes": 0, "host_cache_bytes": 0}
BASELINES = pytest.mark.slow
"""Of what only published systems do with their windows."""


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(250 - 20 * i, i)) for i in range(2)]


def asked(prefixes: list[Prefix]) -> list[Request]:
    """Three rows, two of them on one prefix."""
    return [
        Request(prefix=prefixes[i // 2], suffix=tokens(7, 40 + i).tolist(), budget=BUDGET)
        for i in range(3)
    ]


class Unheld(Guessed, HoldNothing):
    """Nothing but the guess is on the device."""


kv_of = partial(kept_kv, max_tokens=LENGTH)


@pytest.fixture(scope="module")
def plain(engine: Engine, prefixes: list[Prefix]) -> list[np.ndarray]:
    return kv_of(engine, asked(prefixes))


def own(kind: type[DecodeSelection], keep: Keep, **fields: float) -> OwnParts:
    return OwnParts(decoding=decoding(kind, keep=keep, **fields))


def variant(
    engine: Engine,
    *,
    store: object = None,
    config: dict[str, object] | None = None,
    **system: object,
) -> Engine:
    """The same engine with changes of its system and of its configuration."""
    changed = dataclasses.replace(engine.system, **system)
    values = dataclasses.replace(engine.config, system=changed, **(config or {}))
    return engine.variant(values, store=store)


def test_selecting_anew_follows_the_text(
    engine: Engine, prefixes: list[Prefix], plain: list[np.ndarray]
) -> None:
    with variant(engine, decode=None) as other:
        fixed = kv_of(other, asked(prefixes))
    for mine, theirs in zip(plain, fixed, strict=True):
        assert (mine[:, :, :7] == theirs[:, :, :7]).all()  # the suffix
        assert (mine != theirs).any()


@pytest.mark.parametrize(
    ("system", "config", "failing"),
    [
        ({"window": 1.0}, {}, 0.0),
        ({"window": math.inf}, {}, 0.0),
        pytest.param({"window": 4.0, "own": own(SelectFirst, lru)}, {}, 0.0, marks=BASELINES),
        pytest.param(
            {"window": 1.0, "own": own(NearMisses, lookahead, near=3.0)},
            {"device_cache_bytes": 0},
            0.1,
            marks=BASELINES,
        ),
        ({}, COLD_CACHES | {"io_threads": 1}, 0.0),
        ({"window": 1.5}, {"host_cache_bytes": 2**16}, 0.2),
        ({"own": own(HoldNothing, lfu)}, {"device_cache_bytes": 0}, 0.1),
        pytest.param({"own": own(ReadBefore, lru)}, COLD_CACHES, 0.1, marks=BASELINES),
    ],
)
def test_logits_are_the_same_bits_whatever_is_kept_where(
    engine: Engine,
    prefixes: list[Prefix],
    plain: list[np.ndarray],
    system: dict[str, object],
    config: dict[str, object],
    failing: float,
) -> None:
    room = POOL_BYTES - int(str(config.get("device_cache_bytes", 2**20)))
    store = UnsteadyStore(engine.store, failing)
    values = {"prefetch_device_bytes": room} | config
    with variant(engine, store=store, config=values, **system) as other:
        for _ in range(2):  # cold, then warm
            for mine, theirs in zip(plain, kv_of(other, asked(prefixes)), strict=True):
                assert (mine == theirs).all()
        stats = other.stats()
        assert stats.pinned_packs == stats.running == 0
    assert store.reads and not store.twice


@pytest.mark.parametrize("streams", [False, True], ids=["held", "streamed"])
def test_a_token_that_begins_again_scores_once(
    engine: Engine, prefixes: list[Prefix], plain: list[np.ndarray], streams: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its second period needs what the store cannot give, once the first has selected."""
    request = asked(prefixes)[2]
    slots = 4 * engine.layout.groups * engine.layout.pack_bytes if streams else POOL_BYTES
    begin, select, begun = DecodeSelection.begin, DecodeSelection.select, list[int]()

    def counted(self: DecodeSelection, batch: int) -> None:
        begun.append(batch)
        begin(self, batch)

    def then_fails(self: DecodeSelection, period: int, *args: object) -> np.ndarray:
        if period == 1 and len(begun) == 8:
            store.failing = 1.0
        return select(self, period, *args)  # type: ignore[arg-type]

    kept = []
    for fails in (False, True):
        store = UnsteadyStore(engine.store)
        if fails:
            monkeypatch.setattr(DecodeSelection, "begin", counted)
            monkeypatch.setattr(DecodeSelection, "select", then_fails)
        config = COLD | {"prefetch_device_bytes": slots}
        with variant(engine, store=store, config=config, window=1.0) as other:
            kept += kv_of(other, [request])
    assert len(begun) > LENGTH  # one for each token, and those that began again
    assert (kept[0] == kept[1]).all()


def test_four_tokens_select_other_chunks_than_one(
    engine: Engine, prefixes: list[Prefix], plain: list[np.ndarray]
) -> None:
    with variant(engine, decode=Select(score_layers=3, queries=1)) as other:
        for mine, theirs in zip(plain, kv_of(other, asked(prefixes)), strict=True):
            assert scale_error(mine, theirs) > 100 * TIGHT


def test_every_third_token_selects_and_those_between_attend_to_the_same(
    engine: Engine, prefixes: list[Prefix], plain: list[np.ndarray]
) -> None:
    """Whatever else runs: a generation that others join selects for the same of its tokens as one
    that runs alone."""
    select = Select(score_layers=3, queries=4, every=3)
    requests, sampling = asked(prefixes), SamplingParams(max_tokens=LENGTH)
    with variant(engine, config=COLD, decode=select, window=1.0) as other:
        for mine, theirs in zip(plain, kv_of(other, requests), strict=True):
            first = slice(7, 8)  # the first token after the suffix selects
            assert scale_error(mine[:, :, first], theirs[:, :, first]) < TIGHT
            assert scale_error(mine, theirs) > 100 * TIGHT
        alone = [other.generate(request, sampling).results()[0] for request in requests]
        stream = other.generate(requests[0], sampling)
        for _ in range(3):
            next(stream)
        later = other.generate(requests[1:], sampling).results()
        joined = [*stream.results(), *later]
    for text, single in zip(joined, alone, strict=True):
        assert text.token_ids.tolist() == single.token_ids.tolist()
        masses = ([token.attention_mass for token in one.trace.tokens] for one in (text, single))
        np.testing.assert_allclose(*masses, rtol=1e-3)
    for text in alone:
        every = text.trace.tokens
        assert any(token.ssd_reads for token in every[::3])
        for place, token in enumerate(every):
            assert (token.select_ms > 0) == (place % 3 == 0)
            if place % 3:
                assert token.ssd_reads == 0
                assert token.attention_mass == every[place - 1].attention_mass


def test_few_slots_narrow_windows_and_then_let_texts_stream(
    engine: Engine, prefixes: list[Prefix]
) -> None:
    """One selection of all rows and little more; then less than one of a row."""
    groups, pack = engine.layout.groups, engine.layout.pack_bytes
    sampling = SamplingParams(max_tokens=LENGTH)
    expected = [engine.generate(request, sampling).results()[0] for request in asked(prefixes)]
    for slots, streams in ((2 * 3 * 4 * groups, False), (4 * groups, True)):
        streamed = False
        with variant(engine, config=COLD | {"prefetch_device_bytes": slots * pack}) as tight:
            with tight.generate(asked(prefixes), sampling) as stream:
                for _ in stream:
                    batches = list(tight._worker.decoding.batches)
                    streamed |= any(batch.alone for batch in batches)
                texts = stream.results()
            assert tight.stats().pinned_packs == 0
        assert streamed == streams
        for text, alone in zip(texts, expected, strict=True):
            assert text.token_ids.tolist() == alone.token_ids.tolist()


def test_what_cannot_be_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="without a digest"):
        SystemConfig(name="x", digest="none", decode=Select())
    with pytest.raises(ValueError, match=r"window=0\.5"):
        variant(engine, window=0.5)
    with pytest.raises(ValueError, match="queries"):
        variant(engine, decode=Select(queries=65))
    with pytest.raises(ValueError, match="every"):
        Select(every=0)
    with pytest.raises(ValueError, match="every=2"):
        variant(engine, reprefill=Select(every=2))
    with pytest.raises(ValueError, match="every=2"):
        variant(engine, decode=Select(every=2), own=own(HoldNothing, lru))


@pytest.mark.parametrize(
    ("system", "failing"),
    [({"window": 1.0}, 0.0), ({"window": 1.0}, 1.0), ({"own": own(HoldNothing, lru)}, 0.0)],
    ids=["a window", "nothing can be read", "no window"],
)
def test_every_token_tells_where_its_packs_were(
    engine: Engine, prefixes: list[Prefix], system: dict[str, object], failing: float
) -> None:
    """Without caches and other texts, a window of one has what the token before selected."""
    request = asked(prefixes)[2]
    packs = 3 * engine.layout.groups  # a fifth of 15 chunks
    store = UnsteadyStore(engine.store, failing)
    with variant(engine, store=store, config=COLD, **system) as other:
        began = time.perf_counter()
        [text] = other.generate(request, SamplingParams(max_tokens=LENGTH)).results()
        spent_ms = (time.perf_counter() - began) * 1e3
    told = text.trace.tokens
    assert len(told) == LENGTH - 1 and sum(token.ms for token in told) <= spent_ms
    for token in told:
        assert token.device_hits + token.ssd_reads == packs and token.host_hits == 0
        assert token.recomputed == (token.ssd_reads if failing else 0)
        assert 0.2 < token.attention_mass < 1.0
        assert 0 < token.select_ms + token.fetch_ms <= token.ms
    hits = text.trace.decode["device_hits"]
    assert 0.1 < hits < 0.95 if "window" in system else hits == 0
    ssd = text.trace.decode["ssd_bytes"] * len(told) / engine.layout.pack_bytes
    assert round(ssd) == sum(token.ssd_reads for token in told)


def test_a_given_text_is_gone_through_whatever_the_model_makes_of_it(
    engine: Engine, prefixes: list[Prefix]
) -> None:
    given = tuple(tokens(5, 9).tolist())
    request = Request(prefix=prefixes[0], suffix=[1, 2], budget=1.0)
    sampling = SamplingParams(max_tokens=8, forced_ids=given)
    [text] = engine.generate(request, sampling).results()
    assert tuple(text.token_ids[:5].tolist()) == given
    longer = dataclasses.replace(request, suffix=[1, 2, *given])
    [rest] = engine.generate(longer, SamplingParams(max_tokens=3)).results()
    assert text.token_ids[5:].tolist() == rest.token_ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 4])
def test_what_is_guessed_is_attended_to_and_depends_on_nothing_else(
    engine: Engine, prefixes: list[Prefix], plain: list[np.ndarray], queries: int
) -> None:
    """The first period of a token selects by itself, the second is told what the first one saw."""
    told_by = []
    for kind, window, failing in ((Unheld, 2.0, 0.0), (Guessed, 1.0, 0.1)):
        select = Select(score_layers=3, queries=queries)
        system = {"decode": select, "own": own(kind, lru), "window": window}
        with variant(engine, store=UnsteadyStore(engine.store, failing), **system) as other:
            told_by.append(kv_of(other, asked(prefixes)))
    for mine, again, unguessed in zip(*told_by, plain, strict=True):
        assert (mine == again).all()
        assert (mine != unguessed).any()


def test_windows_give_way_to_generations_that_come_later(
    engine: Engine, prefixes: list[Prefix]
) -> None:
    """The first has a window of four selections until the others begin, and again once they end."""
    requests = asked(prefixes)
    sampling = [SamplingParams(max_tokens=n) for n in (96, 16, 8)]
    room = 2 * 3 * 4 * 2 * engine.layout.groups * engine.layout.pack_bytes
    config = COLD | {"prefetch_device_bytes": room}
    with variant(engine, config=config, window=4.0) as tight:
        first = tight.generate(requests[0], sampling[0])
        for _ in range(40):
            next(first)
        later = tight.generate(requests[1:], sampling[1:]).results()
        texts = [*first.results(), *later]
        assert tight.stats().pinned_packs == tight.stats().running == 0
    for request, params, text in zip(requests, sampling, texts, strict=True):
        (alone,) = engine.generate(request, params).results()
        assert text.token_ids.tolist() == alone.token_ids.tolist()
