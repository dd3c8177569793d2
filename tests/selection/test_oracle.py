"""What `ckv` selects, against Equation 1 in numpy: at first, in batches, and token by token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_sharp import MODEL, Sharp
from engine_support import TIGHT, scale_error, tokens
from kernel_targets import BEST
from numpy_qwen import LayerKv, NumpyQwen, softmax

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.selection.select import Select
from ckv_jax.storage.prefix import Prefix

CHUNK, WINDOW = 16, 4
PERIODS = {0: (range(0, 5), [0, 1, 3]), 1: (range(5, 6), [5])}
"""Layers that share a selection, and those of them that score: at most three, spread evenly."""
LENGTH = 250
MASS = 5e-3 if BEST.path else 1e-4
"""Of a share of attention mass: native kernels round queries to int8."""


@dataclass
class Selected:
    """One row's way through the layers: what it selected, and how much attention that held."""

    limit: int
    ids: dict[int, np.ndarray] = field(default_factory=dict)
    mass: list[float] = field(default_factory=list)
    own: list[LayerKv] = field(default_factory=list)
    asking: dict[int, list[tuple[np.ndarray, int]]] = field(default_factory=dict)
    """Hidden states and positions of the tokens that selected, by period."""


class Oracle:
    """The sparse re-prefill and decode of one stored prefix, one row at a time."""

    def __init__(self, model: NumpyQwen, engine: Engine, prefix: Prefix) -> None:
        self.model = model
        self.kv = model.prefill(prefix.tokens)
        self.start = prefix.num_tokens
        self.chunks = -(-self.start // CHUNK)
        with engine.store.reader(prefix) as reader:
            digest = reader.read_digest()
        assert digest is not None and digest.kind == "int4"
        keys = digest.keys().astype(np.float64)  # [R, T, K, D]
        self.probe = dict(zip(prefix.layout.digest_layers, keys, strict=True))
        assert sorted(self.probe) == [0, 1, 3, 5]

    def select(self, row: Selected, period: int, hidden: np.ndarray, positions: np.ndarray) -> None:
        """The best chunks of Equation 1, for the queries of these hidden states [n, E]."""
        scores = np.zeros(self.chunks)
        for layer in PERIODS[period][1]:
            q = self.model.query(layer, hidden, positions)  # [n, H, D]
            group = q.shape[1] // self.probe[layer].shape[1]
            keys = np.repeat(self.probe[layer], group, axis=1)
            weights = softmax(np.einsum("shd,thd->hst", q, keys) * MODEL.head_dim**-0.5)
            by_token = np.pad(weights.sum(axis=(0, 1)), (0, self.chunks * CHUNK - self.start))
            scores += by_token.reshape(self.chunks, CHUNK).sum(axis=1)
        ranked = np.sort(scores)[::-1]
        gap = ranked[row.limit - 1] - ranked[row.limit]
        assert gap > 1e-4 * ranked[0], "a tie: float32 may select otherwise"
        row.ids[period] = np.sort(np.argsort(-scores)[: row.limit])
        row.mass.append(float(scores[row.ids[period]].sum() / scores.sum()))

    def first(self, suffix: np.ndarray, budget: float) -> tuple[Selected, np.ndarray]:
        """The selection of a suffix, and its logits."""
        row = Selected(math.ceil(budget * self.chunks))
        positions = self.start + np.arange(len(suffix))
        hidden = self.model.embed(suffix)
        for period, (layers, _) in PERIODS.items():
            self.select(row, period, hidden[-WINDOW:], positions[-WINDOW:])
            for layer in layers:
                row.own.append(self.model.kv(layer, hidden, positions))
                hidden = self._layer(row, period, layer, hidden, positions)
        return row, self.model.logits(hidden[-1])

    def next(self, row: Selected, token: int, queries: int) -> np.ndarray:
        """Logits after one more token; it and those before it, `queries` in all, select; 0: the
        text goes on by what its question selected."""
        at = np.array([self.start + len(row.own[0][0])])
        hidden = self.model.embed(np.array([token]))
        for period, (layers, _) in PERIODS.items():
            if queries:
                asking = row.asking.setdefault(period, [])
                asking.append((hidden[0], int(at[0])))
                states, places = zip(*asking[-queries:], strict=True)
                self.select(row, period, np.stack(states), np.array(places))
            for layer in layers:
                new = self.model.kv(layer, hidden, at)
                row.own[layer] = tuple(
                    np.concatenate(pair) for pair in zip(row.own[layer], new, strict=True)
                )
                hidden = self._layer(row, period, layer, hidden, at)
        return self.model.logits(hidden[-1])

    def _layer(
        self, row: Selected, period: int, layer: int, hidden: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        kv = tuple(np.concatenate(p) for p in zip(self.kv[layer], row.own[layer], strict=True))
        places = np.arange(len(kv[0]))
        stored = (places < self.start) & np.isin(places // CHUNK, row.ids[period])
        ours = (places >= self.start) & (places <= positions[:, None])
        return self.model.layer(layer, hidden, positions, kv, stored | ours)


@pytest.fixture(scope="module")
def made(
    sharp: Sharp, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Prefix, Oracle]]:
    with sharp.fresh(tmp_path_factory.mktemp("store")) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        yield engine, prefix, Oracle(sharp.model, engine, prefix)


def test_the_oracle_is_sharp_enough_to_tell(made: tuple[Engine, Prefix, Oracle]) -> None:
    _, _, oracle = made
    selected = {}
    for name, suffix in (("all", tokens(12, 1)), ("last", tokens(12, 1)[-WINDOW - 1 : -1])):
        row, _ = oracle.first(suffix, 0.2)
        selected[name] = row
    assert any((selected["all"].ids[p] != selected["last"].ids[p]).any() for p in PERIODS)
    assert 0.2 < np.mean(selected["all"].mass) < 0.99


@pytest.mark.parametrize("length", [1, 3, 4, 5, 16])
def test_one_row_selects_by_its_last_queries(
    made: tuple[Engine, Prefix, Oracle], length: int
) -> None:
    engine, prefix, oracle = made
    suffix = tokens(length, length)
    row, logits = oracle.first(suffix, 0.2)
    (result,) = engine.reprefill([Request(prefix=prefix, suffix=suffix, budget=0.2)])
    got = engine.last_selection(prefix)
    assert [ids.tolist() for ids in got] == [row.ids[p].tolist() for p in PERIODS]
    np.testing.assert_allclose(result.trace.period_attention_mass, row.mass, rtol=MASS)
    assert scale_error(result.logits, logits) < TIGHT


def test_rows_of_a_padded_batch_select_what_they_would_alone(
    made: tuple[Engine, Prefix, Oracle],
) -> None:
    engine, prefix, oracle = made
    asked = [(tokens(2, 31), 0.1), (tokens(16, 32), 0.3), (tokens(9, 33), 0.2)]
    rows = [oracle.first(suffix, budget) for suffix, budget in asked]
    results = engine.reprefill(
        [Request(prefix=prefix, suffix=suffix, budget=budget) for suffix, budget in asked]
    )
    for period, got in enumerate(engine.last_selection(prefix)):
        union = np.unique(np.concatenate([row.ids[period] for row, _ in rows]))
        assert got.tolist() == union.tolist()
    for result, (row, logits) in zip(results, rows, strict=True):
        np.testing.assert_allclose(result.trace.period_attention_mass, row.mass, rtol=MASS)
        assert result.trace.chunks == {
            "selected": len(PERIODS) * row.limit,
            "total": len(PERIODS) * oracle.chunks,
        }
        assert scale_error(result.logits, logits) < TIGHT


@pytest.mark.parametrize("queries", [1, 3, 4])
def test_what_is_selected_anew_is_selected_by_the_tokens_themselves(
    made: tuple[Engine, Prefix, Oracle], queries: int
) -> None:
    """The text tells: its likeliest token is another one where other chunks are attended to."""
    engine, prefix, oracle = made
    suffix, length = tokens(7, 40), 14
    texts = {}
    for count in (queries, 0):
        row, logits = oracle.first(suffix, 0.2)
        text = [int(logits.argmax())]
        for _ in range(1, length):
            logits = oracle.next(row, text[-1], count)
            best = np.sort(logits)
            assert best[-1] - best[-2] > 2 * TIGHT * np.abs(logits).max(), "a tie"
            text.append(int(logits.argmax()))
        texts[count] = text
    request = Request(prefix=prefix, suffix=suffix, budget=0.2)
    for count, text in texts.items():
        decode = Select(score_layers=3, queries=count) if count else None
        system = dataclasses.replace(engine.system, decode=decode)
        with engine.variant(dataclasses.replace(engine.config, system=system)) as other:
            (got,) = other.generate(request, SamplingParams(max_tokens=length)).results()
        assert got.token_ids.tolist() == text
    assert texts[queries] != texts[0]
