"""Texts over several prefixes at once: which of them choose in one call, and what each chooses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compilations import compilations
from engine_sharp import COLD, Sharp
from engine_support import TIGHT, scale_error, tokens
from engine_tiny import tiny_engine

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.decode.scoring import Scoring, SelectCall
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.selection.base import Selection
from ckv_jax.storage.prefix import Prefix

LENGTHS = (250, 230, 210, 1300)
"""Tokens of each prefix: the last needs other programs."""


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store"), max_batch=8) as made:
        yield made


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(length, i)) for i, length in enumerate(LENGTHS)]


def asked(prefixes: list[Prefix], which: tuple[int, ...]) -> list[Request]:
    return [
        Request(prefix=prefixes[i], suffix=tokens(7, 40 + row).tolist(), budget=0.2)
        for row, i in enumerate(which)
    ]


def computed(engine: Engine, requests: list[Request]) -> list[np.ndarray]:
    """Keys and values of all that each text computed, which every attention has been through."""
    texts = engine.generate(requests, SamplingParams(max_tokens=12), keep_kv=True).results()
    return [np.asarray(text.completion().kv) for text in texts]


@pytest.mark.parametrize(
    ("which", "calls"),
    [
        ((0, 1, 2), {(4, 4)}),
        ((0, 1, 3), {(2, 2), (1, 1)}),
        ((0, 0, 1, 2, 0), {(4, 1), (2, 2)}),
        ((1, 0, 1, 0), {(2, 1)}),
    ],
)
def test_texts_choose_what_they_would_alone(
    engine: Engine,
    prefixes: list[Prefix],
    monkeypatch: pytest.MonkeyPatch,
    which: tuple[int, ...],
    calls: set[tuple[int, int]],
) -> None:
    """`calls`: rows and prefixes of each call that chooses."""
    made: set[tuple[int, int]] = set()
    select = Scoring.select

    def watched(self: Scoring, call: SelectCall, *args: Any) -> Any:
        made.add((len(call.rows), len(call.probes)))
        return select(self, call, *args)

    requests = asked(prefixes, which)
    monkeypatch.setattr(Scoring, "select", watched)
    together = computed(engine, requests)
    assert made >= calls  # and those of fewer rows, while not all have begun
    for request, mine in zip(requests, together, strict=True):
        (alone,) = computed(engine, [request])
        assert scale_error(mine, alone) < TIGHT


def test_a_pack_that_two_prefixes_share_is_used_once(sharp: Sharp, tmp_path: Path) -> None:
    with sharp.fresh(tmp_path, **COLD) as engine:
        parent = engine.ingest(tokens(160))
        child = engine.ingest(np.concatenate([tokens(160), tokens(64, 1)]))
        prefixes = engine._worker.prefixes
        views = [prefixes.known(prefix) for prefix in (parent, child)]
        chosen = [
            (views[0], _of([[0, 2, -1]], [[0.5, 0.25, 0.0]])),
            (views[1], _of([[2, 12, -1]], [[0.5, 0.125, 0.0]])),
        ]
        found = _histories(engine, views[1], [0, 1, 2, 12], chosen)
    for (importance, uses), (more, often) in found:
        assert (more - importance).tolist() == [0.5, 0.0, 0.75, 0.125]
        assert (often - uses).tolist() == [1, 0, 1, 1]


def test_what_nobody_chose_gets_its_attention_where_the_policy_asks_for_that(
    sharp: Sharp, tmp_path: Path
) -> None:
    """Each prefix gives every chunk that it did not choose its score."""
    with sharp.fresh(tmp_path, system={"policy": "frequency-attention"}, **COLD) as engine:
        parent = engine.ingest(tokens(160))
        child = engine.ingest(np.concatenate([tokens(160), tokens(64, 1)]))
        prefixes = engine._worker.prefixes
        views = [prefixes.known(prefix) for prefix in (parent, child)]
        chosen = [
            (views[0], _of([[0, 2, -1]], [[0.5, 0.25, 0.0]], 0.125)),
            (views[1], _of([[2, 12, -1]], [[0.5, 0.25, 0.0]], 0.0625)),
        ]
        found = _histories(engine, views[1], [0, 1, 2, 12, 13], chosen)
    for (importance, uses), (more, often) in found:
        assert (more - importance).tolist() == [0.5625, 0.1875, 0.75, 0.25, 0.0625]
        assert (often - uses).tolist() == [1, 0, 1, 1, 0]


def _histories(
    engine: Engine, view: OpenPrefix, chunks: list[int], chosen: list[tuple[OpenPrefix, Selection]]
) -> list[tuple[Any, Any]]:
    """What the caches know of some chunks' packs, layer group by layer group, before and after
    choices are recorded."""
    groups = range(engine.layout.groups)
    pages = [view.pages(group, np.array(chunks)) for group in groups]
    tiers = engine._worker.memory.tiers
    before = [tiers.history(each) for each in pages]
    engine._worker.prefixes.record_all(groups, chosen)
    return list(zip(before, [tiers.history(each) for each in pages], strict=True))


def _of(ids: list[list[int]], attention: list[list[float]], score: float = 0.0) -> Selection:
    rows = np.array(ids, np.int32)
    scores = np.full((1, 16), score, np.float32)
    part: Any = np.array(attention, np.float32)
    known: dict[str, Any] = {"ids": rows, "attention": part, "scores": scores}
    return Selection(**{name: known.get(name, np.ones(1)) for name in Selection._fields})


@pytest.mark.slow
def test_nothing_is_compiled_whoever_shares_a_prefix(tmp_path: Path) -> None:
    with tiny_engine(
        tmp_path, system="ckv", nothing_compiled=True, max_batch=4, device_cache_bytes=2**15
    ) as engine:
        prefixes = [engine.ingest(tokens(140 + i, i)) for i in range(4)]
        engine.warmup(prefixes[0], max_batch=4, max_suffix=7, budgets=[0.2], max_tokens=12)
        warm = compilations()
        for which in ((0, 1, 2, 3), (0, 0, 1, 2), (0, 1, 1, 1), (2, 2, 3, 3), (0, 1), (0, 1, 1)):
            computed(engine, asked(prefixes, which))
        assert compilations() == warm


def test_a_call_that_fails_within_a_token_fails_its_texts_alone(
    engine: Engine, prefixes: list[Prefix], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = asked(prefixes, (0, 1))
    expected = computed(engine, requests)
    layers = engine._worker.layers
    extend, calls = layers.extend, 0

    def fails(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("no device")
        return extend(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(layers, "extend", fails)
        with pytest.raises(RuntimeError, match="no device"):
            computed(engine, requests)
    for mine, wanted in zip(computed(engine, requests), expected, strict=True):
        assert scale_error(mine, wanted) < TIGHT
