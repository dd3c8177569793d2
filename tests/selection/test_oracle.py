"""What `ckv` selects, against Equation 1 in numpy: at first, in batches, and token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
from engine_sharp import MODEL, Sharp
from engine_support import TIGHT, scale_error, tokens
from heads_oracle import Decode
from kernel_targets import BEST
from numpy_qwen import LayerKv, NumpyQwen, softmax

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.selection.select import Select
from ckv_jax.storage.prefix import Prefix
from tests.support.truth import digest_keys

CHUNK, WINDOW = 16, 4
PERIODS = {0: (range(0, 5), [0, 1, 3]), 1: (range(5, 6), [5])}
"""Layers that share a selection, and those of them that score: at most three, spread evenly."""
LENGTH = 250
MASS = 5e-3 if BEST.path else 1e-4
"""Of a share of attention mass: native kernels round queries to int8."""


class Row(Decode):
    """One row over a prefix: what it selected, and how much attention that held."""

    def __init__(
        self, model: NumpyQwen, prefix: np.ndarray, kv: list[LayerKv],
        probe: dict[int, np.ndarray], budget: float, *, queries: int = 0,
    ) -> None:  # fmt: skip
        """`probe`: keys of the digest [T, K, D] by layer; `queries`: tokens, each new one and those
        before it, that select for a generation; 0: it goes on by what its question selected."""
        super().__init__(model, prefix, CHUNK, budget, kv)
        self.probe = probe
        self.queries = queries
        self.ids: dict[int, np.ndarray] = {}
        self.mass: list[float] = []
        self.asking: dict[int, list[tuple[np.ndarray, int]]] = {0: [], 1: []}
        """Hidden states and positions of the tokens that selected, by period."""

    def seen(self, layer: int, at: np.ndarray, done: int) -> tuple[np.ndarray, Sequence[LayerKv]]:
        """What the period selected."""
        period, hidden = int(layer >= PERIODS[1][0].start), self.entered[layer]
        if layer == PERIODS[period][0].start and not done:
            self.select(period, hidden[-WINDOW:], at[-WINDOW:])
        elif layer == PERIODS[period][0].start and self.queries:
            asking = self.asking[period]
            asking.append((hidden[0], int(at[0])))
            states, places = zip(*asking[-self.queries :], strict=True)
            self.select(period, np.stack(states), np.array(places))
        seen = self.text(at, done)
        for chunk in self.ids[period]:
            seen[:, self.tokens(chunk)] = True
        return seen, ()

    def select(self, period: int, hidden: np.ndarray, positions: np.ndarray) -> None:
        """The best chunks of Equation 1, for the queries of these hidden states [n, E]."""
        scores = np.zeros(len(self.edges))
        for layer in PERIODS[period][1]:
            q = self.model.query(layer, hidden, positions)  # [n, H, D]
            group = q.shape[1] // self.probe[layer].shape[1]
            keys = np.repeat(self.probe[layer], group, axis=1)
            weights = softmax(np.einsum("shd,thd->hst", q, keys) * MODEL.head_dim**-0.5)
            scores += np.add.reduceat(weights.sum(axis=(0, 1)), self.edges)
        ranked = np.sort(scores)[::-1]
        gap = ranked[self.limit - 1] - ranked[self.limit]
        assert gap > 1e-4 * ranked[0], "a tie: float32 may select otherwise"
        self.ids[period] = np.sort(np.argsort(-scores)[: self.limit])
        self.mass.append(float(scores[self.ids[period]].sum() / scores.sum()))

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Of the token after these."""
        return self.model.logits(self.step(ids)[-1])


Made = tuple[Engine, Prefix, Callable[..., Row]]


@pytest.fixture(scope="module")
def made(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with sharp.fresh(tmp_path_factory.mktemp("store")) as engine:
        prefix = engine.ingest(tokens(LENGTH))
        with engine.store.reader(prefix) as reader:
            digest = reader.read_digest()
        assert digest is not None and digest.kind == "int4"
        keys = digest_keys(digest).astype(np.float64)  # [R, T, K, D]
        probe = dict(zip(prefix.layout.digest_layers, keys, strict=True))
        assert sorted(probe) == [0, 1, 3, 5]
        kv = sharp.model.prefill(prefix.tokens)
        yield engine, prefix, partial(Row, sharp.model, prefix.tokens, kv, probe)


def test_the_oracle_is_sharp_enough_to_tell(made: Made) -> None:
    rows = [made[2](0.2) for _ in range(2)]
    for row, suffix in zip(rows, (tokens(12, 1), tokens(12, 1)[-WINDOW - 1 : -1]), strict=True):
        row.step(suffix)
    assert any((rows[0].ids[period] != rows[1].ids[period]).any() for period in PERIODS)
    assert 0.2 < np.mean(rows[0].mass) < 0.99


@pytest.mark.parametrize(
    "asked",
    [
        *[[(tokens(length, length), 0.2)] for length in (1, 3, 4, 5, 16)],
        [(tokens(2, 31), 0.1), (tokens(16, 32), 0.3), (tokens(9, 33), 0.2)],
    ],
    ids=len,
)
def test_rows_of_a_batch_select_by_their_last_queries(
    made: Made, asked: list[tuple[np.ndarray, float]]
) -> None:
    engine, prefix, row_of = made
    rows = [row_of(budget) for _, budget in asked]
    logits = [row.logits(suffix) for row, (suffix, _) in zip(rows, asked, strict=True)]
    results = engine.reprefill(
        [Request(prefix=prefix, suffix=suffix, budget=budget) for suffix, budget in asked]
    )
    for period, got in enumerate(engine.last_selection(prefix)):
        union = np.unique(np.concatenate([row.ids[period] for row in rows]))
        assert got.tolist() == union.tolist()
    for result, row, expected in zip(results, rows, logits, strict=True):
        np.testing.assert_allclose(result.trace.period_attention_mass, row.mass, rtol=MASS)
        assert result.trace.chunks == {
            "selected": len(PERIODS) * row.limit,
            "total": len(PERIODS) * prefix.num_chunks,
        }
        assert scale_error(result.logits, expected) < TIGHT


@pytest.mark.parametrize("queries", [1, 3, 4])
def test_what_is_selected_anew_is_selected_by_the_tokens_themselves(
    made: Made, queries: int
) -> None:
    """The text tells: its likeliest token is another one where other chunks are attended to."""
    engine, prefix, row_of = made
    suffix, length = tokens(7, 40), 14
    texts = {}
    for count in (queries, 0):
        row = row_of(0.2, queries=count)
        logits = row.logits(suffix)
        text = [int(logits.argmax())]
        for _ in range(1, length):
            logits = row.logits(np.array(text[-1:]))
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
