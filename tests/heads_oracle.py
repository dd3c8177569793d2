"""Decode in numpy where every KV head chooses by the means of its own chunks' keys."""

from __future__ import annotations

import math

import numpy as np
from engine_sharp import MODEL
from numpy_qwen import LayerKv, NumpyQwen, softmax

from ckv_jax import Engine
from ckv_jax.storage.prefix import Prefix

HEADS = MODEL.num_kv_heads


class Oracle:
    """Decode over one stored prefix."""

    def __init__(
        self, model: NumpyQwen, engine: Engine, prefix: Prefix, *, budget: float, outliers: int = 0
    ) -> None:
        """`outliers`: chunks of each head."""
        self.model = model
        self.kv = model.prefill(prefix.tokens)
        self.start = prefix.num_tokens
        self.chunk = prefix.layout.chunk_tokens
        self.edges = np.arange(0, self.start, self.chunk)
        self.count = np.diff([*self.edges, self.start])
        self.limit = math.ceil(budget * len(self.edges)) + outliers
        self.order: np.ndarray = np.tile(np.arange(self.start), (MODEL.num_layers * HEADS, 1))
        self.steady: list[int] = []
        """Chunks that are attended to in any case."""
        if prefix.layout.alike:
            with engine.store.reader(prefix) as reader:
                self.order = reader.order
        if prefix.layout.alike or outliers:
            last = (self.start - 64) // self.chunk
            self.steady = [0, *range(last, len(self.edges))]
            self.limit += len(self.steady)
        self.outliers = outliers
        self.own: list[LayerKv] = []
        self.ids: list[np.ndarray] = []
        """Of each layer and head, of the latest token."""

    def step(self, ids: np.ndarray) -> None:
        """Goes on by tokens int [n] that choose together."""
        first = not self.own
        done = 0 if first else len(self.own[0][0])
        at = self.start + done + np.arange(len(ids))
        hidden = self.model.embed(ids)
        self.ids = []
        for layer in range(MODEL.num_layers):
            seen = self._seen(layer, hidden, at, done)
            new = self.model.kv(layer, hidden, at)
            if first:
                self.own.append(new)
            else:
                old = self.own[layer]
                self.own[layer] = tuple(np.concatenate(two) for two in zip(old, new, strict=True))  # type: ignore[assignment]
            parts = [self.kv[layer], self.own[layer]]
            whole = [np.concatenate(of) for of in zip(*parts, strict=True)]
            hidden = self.model.layer(layer, hidden, at, (whole[0], whole[1]), seen)

    def _means(self, layer: int) -> np.ndarray:
        """The layer's keys [T, K, D], each token's its chunk's mean."""
        keys = self.kv[layer][0]
        means = np.empty_like(keys)
        for head in range(HEADS):
            order = self.order[layer * HEADS + head]
            sums = np.add.reduceat(keys[order, head], self.edges)
            means[order, head] = np.repeat(sums / self.count[:, None], self.count, axis=0)
        return means

    def _odd(self, layer: int, head: int) -> np.ndarray:
        """The chunks with a key that is least like the mean."""
        keys, means = self.kv[layer][0][:, head], self._means(layer)[:, head]
        lengths = np.linalg.norm(keys, axis=1) * np.linalg.norm(means, axis=1)
        cosines = (keys * means).sum(1) / lengths
        least = np.minimum.reduceat(cosines[self.order[layer * HEADS + head]], self.edges)
        return np.argsort(least)[: self.outliers]

    def _seen(self, layer: int, hidden: np.ndarray, at: np.ndarray, done: int) -> np.ndarray:
        """[H, S, T]: every query head sees what its KV head chose, and the text up to itself."""
        q, keys = self.model.query(layer, hidden, at), self._means(layer)
        group = q.shape[1] // HEADS
        seen = np.zeros((q.shape[1], len(at), self.start + done + len(at)), bool)
        seen[:, :, self.start :] = np.tri(len(at), done + len(at), done, dtype=bool)
        for head in range(HEADS):
            mine = slice(head * group, (head + 1) * group)
            order = self.order[layer * HEADS + head]
            means = keys[order[self.edges], head]  # [M, D]
            logits = np.einsum("sgd,md->sgm", q[:, mine], means) * MODEL.head_dim**-0.5
            scores = softmax(logits + np.log(self.count)).sum(axis=(0, 1))
            largest = scores.max()
            scores[self.steady] += len(at) * group
            if self.outliers:
                scores[self._odd(layer, head)] += len(at) * group
            ranked = np.argsort(-scores)
            if self.limit < len(scores):
                gap = scores[ranked[self.limit - 1]] - scores[ranked[self.limit]]
                assert gap > 1e-5 * largest, "a tie: float32 may choose otherwise"
            best = np.sort(ranked[: self.limit])
            self.ids.append(best)
            for chunk in best:
                seen[mine, :, order[self._tokens(chunk)]] = True
        return seen

    def _tokens(self, chunk: int) -> slice:
        return slice(chunk * self.chunk, (chunk + 1) * self.chunk)
