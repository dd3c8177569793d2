"""KVSwap, InfiniGen and SolidAttention against numpy: what they score, what they attend to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compilations import compilations
from engine_sharp import COLD, MODEL, Sharp
from engine_support import check_alone, check_kv, kept_kv, small_engine, tokens
from engine_tiny import TINY
from numpy_qwen import LayerKv, NumpyQwen, softmax

from ckv_jax import Request, SamplingParams
from ckv_jax.baselines.infinigen import PARTIAL
from ckv_jax.baselines.kvswap import RANK
from ckv_jax.config import SystemConfig
from ckv_jax.systems import SYSTEMS

LENGTH, BUDGET, QUESTION = 12, 0.2, 7
WIDTH = MODEL.num_kv_heads * MODEL.head_dim


class Oracle:
    """Decode over one prefix, whose chunks all heads of a layer select together."""

    def __init__(self, model: NumpyQwen, prefix: np.ndarray, chunk: int) -> None:
        self.model, self.chunk, self.start = model, chunk, len(prefix)
        self.kv = model.prefill(prefix)
        self.edges = np.arange(0, self.start, chunk)
        self.count = np.diff([*self.edges, self.start])
        self.limit = math.ceil(BUDGET * len(self.edges))
        self.ends = [0, *range((self.start - 64) // chunk, len(self.edges))]
        """Chunks outside of the budget."""
        self.local: list[int] = []
        """Chunks within it that are attended to in any case."""
        self.own: list[LayerKv] = []

    def by_means(self, layer: int, hidden: np.ndarray, at: np.ndarray) -> np.ndarray:
        """The attention mass [M] of chunks by their mean keys."""
        q = self.model.query(layer, hidden, at)  # [S, H, D]
        sums = np.add.reduceat(self.kv[layer][0], self.edges)
        means = np.repeat(sums / self.count[:, None, None], q.shape[1] // sums.shape[1], axis=1)
        logits = np.einsum("shd,mhd->shm", q, means) * MODEL.head_dim**-0.5
        return np.asarray(softmax(logits + np.log(self.count)).sum(axis=(0, 1)))

    def scores(self, layer: int, hidden: np.ndarray, at: np.ndarray) -> np.ndarray:
        """What ranks the chunks [M] for a token of a generation, by what enters a layer."""
        return self.by_means(layer, hidden, at)

    def guess_by(self, entered: list[np.ndarray], layer: int) -> np.ndarray:
        """Of what entered the layers so far, what a layer's scores go by."""
        return entered[layer]

    def step(self, ids: np.ndarray) -> None:
        """Goes on by tokens int [n]; the first of all are the question."""
        done = len(self.own[0][0]) if self.own else 0
        at = self.start + done + np.arange(len(ids))
        hidden, entered = self.model.embed(ids), []
        for layer in range(MODEL.num_layers):
            entered.append(hidden)
            by = hidden if not done else self.guess_by(entered, layer)
            scores = (self.scores if done else self.by_means)(layer, by, at)
            selected = self.selected(scores)
            seen = np.zeros((len(at), self.start + done + len(at)), bool)
            for chunk in selected:
                seen[:, chunk * self.chunk : min(self.start, (chunk + 1) * self.chunk)] = True
            seen[:, self.start :] = np.tri(len(at), done + len(at), done, dtype=bool)
            new = self.model.kv(layer, hidden, at)
            if not done:
                self.own.append(new)
            else:
                old = self.own[layer]
                self.own[layer] = np.concatenate([old[0], new[0]]), np.concatenate([old[1], new[1]])
            whole = [
                np.concatenate(pair) for pair in zip(self.kv[layer], self.own[layer], strict=True)
            ]
            hidden = self.model.layer(layer, hidden, at, (whole[0], whole[1]), seen)

    def selected(self, scores: np.ndarray) -> list[int]:
        """What is kept in any case, and the best of the others."""
        left = [c for c in range(len(scores)) if c not in (*self.ends, *self.local)]
        count = self.limit - len(self.local)
        ranked = sorted(left, key=lambda chunk: -scores[chunk])
        gap = scores[ranked[count - 1]] - scores[ranked[count]]
        assert gap > 1e-5 * np.abs(scores).max(), "a tie: float32 may select otherwise"
        return sorted([*self.ends, *self.local, *ranked[:count]])


class KvSwap(Oracle):
    """Groups by the best key of low rank, a layer before."""

    def scores(self, layer: int, hidden: np.ndarray, at: np.ndarray) -> np.ndarray:
        rows = self.kv[layer][0].reshape(self.start, WIDTH)
        basis = np.linalg.svd(rows.T, full_matrices=False)[0][:, : round(RANK * WIDTH)]
        q = self.model.query(layer, hidden, at)[0]  # [H, D]
        mean = q.reshape(MODEL.num_kv_heads, -1, MODEL.head_dim).mean(axis=1).reshape(-1)
        products = (rows @ basis) @ (basis.T @ mean)
        return np.asarray(np.maximum.reduceat(products, self.edges))

    def guess_by(self, entered: list[np.ndarray], layer: int) -> np.ndarray:
        return entered[max(0, layer - 1)]


class Infini(KvSwap):
    """Chunks by their attention mass over a fifth of each head's skewed columns."""

    def scores(self, layer: int, hidden: np.ndarray, at: np.ndarray) -> np.ndarray:
        keys, count = self.kv[layer][0], round(PARTIAL * MODEL.head_dim)
        q = self.model.query(layer, hidden, at)[0].reshape(MODEL.num_kv_heads, -1, MODEL.head_dim)
        mass = 0
        for head in range(MODEL.num_kv_heads):
            basis = np.linalg.svd(keys[:, head].T, full_matrices=False)[0][:, :count]
            logits = (q[head] @ basis) @ (keys[:, head] @ basis).T * MODEL.head_dim**-0.5
            mass = mass + softmax(logits).sum(axis=0)
        return np.add.reduceat(np.asarray(mass), self.edges)


class Solid(Oracle):
    """Blocks by their mean keys; half of the budget is the latest ones before the ends."""

    def __init__(self, model: NumpyQwen, prefix: np.ndarray, chunk: int) -> None:
        super().__init__(model, prefix, chunk)
        self.local = [*range(self.ends[1] - self.limit // 2, self.ends[1])]


CASES: dict[str, tuple[Callable[..., Oracle], int]] = {
    "kvswap": (KvSwap, 250), "infinigen": (Infini, 600), "solidattention": (Solid, 600),
}  # fmt: skip


def by_means(name: str) -> SystemConfig:
    return dataclasses.replace(SYSTEMS[name], digest="means")


def asked(prefix: object, seed: int = 41) -> Request:
    return Request(prefix=prefix, suffix=tokens(QUESTION, seed).tolist(), budget=BUDGET)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_a_generation_is_that_of_numpy(sharp: Sharp, tmp_path: Path, name: str) -> None:
    kind, length = CASES[name]
    with sharp.fresh(tmp_path, system=by_means(name), **COLD) as engine:
        prefix = engine.ingest(tokens(length, 5))
        [text] = engine.generate(
            asked(prefix), SamplingParams(max_tokens=LENGTH), keep_kv=True
        ).results()
    oracle = kind(sharp.model, prefix.tokens, SYSTEMS[name].chunk_tokens)
    oracle.step(tokens(QUESTION, 41))
    for token in text.token_ids:
        oracle.step(np.array([token]))
    check_kv(text, oracle.own)


@pytest.mark.parametrize("name", ["infinigen", "solidattention"])
def test_a_batch_says_what_each_says_alone(sharp: Sharp, tmp_path: Path, name: str) -> None:
    with sharp.fresh(tmp_path, system=by_means(name)) as engine:
        prefixes = [engine.ingest(tokens(300 - 20 * i, i)) for i in range(2)]
        requests = [asked(prefixes[i > 1], 41 + i) for i in range(3)]
        check_alone(engine, requests, max_tokens=LENGTH)


def test_most_blocks_are_read_before_they_are_selected(sharp: Sharp, tmp_path: Path) -> None:
    """Those of the token before, while another layer computes; the first layer's are not."""
    with sharp.fresh(tmp_path, system=by_means("solidattention"), **COLD) as engine:
        prefix = engine.ingest(tokens(600, 5))
        [text] = engine.generate(asked(prefix), SamplingParams(max_tokens=LENGTH)).results()
    later = text.trace.tokens[1:]
    assert sum(token.ahead for token in later) > 0.5 * sum(token.ssd_reads for token in later)
    assert text.trace.tokens[0].ahead == 0


@pytest.mark.parametrize("name", ["infinigen", "solidattention"])
def test_a_warm_engine_compiles_nothing(tmp_path: Path, name: str) -> None:
    model = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2)
    system = SYSTEMS[name]
    with small_engine(tmp_path, system=system, model=model, nothing_compiled=True) as engine:
        prefix = engine.ingest(tokens(400))
        engine.warmup(prefix, max_batch=2, max_suffix=8, budgets=[BUDGET], max_tokens=LENGTH)
        warm = compilations()
        kept_kv(engine, [asked(prefix), asked(prefix, 42)], max_tokens=LENGTH)
        assert compilations() == warm
