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
    """Decode over one stored prefix. Chunks that are estimated take part as so many tokens with
    their mean key and value; of low rank, those that are chosen by their score do with the keys of
    that rank."""

    def __init__(
        self,
        model: NumpyQwen,
        engine: Engine,
        prefix: Prefix,
        *,
        budget: float,
        outliers: int = 0,
        estimated: int = 0,
        dense: int = 0,
        rank: int = 0,
    ) -> None:
        """`outliers`, `estimated`: chunks of each head; `dense`: layers from the first one on that
        attend to everything once the question is through; `rank`: of keys, 0: their own."""
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
        self.estimated = estimated
        self.dense = dense
        self.rank = rank
        self.own: list[LayerKv] = []
        self.ids: list[np.ndarray] = []
        """Of each layer and head, of the latest token."""

    def step(self, ids: np.ndarray) -> None:
        """Goes on by tokens int [n] that choose together; the first ones estimate nothing."""
        first = not self.own
        done = 0 if first else len(self.own[0][0])
        at = self.start + done + np.arange(len(ids))
        hidden = self.model.embed(ids)
        self.ids = []
        for layer in range(MODEL.num_layers):
            seen, blurred = self._seen(layer, hidden, at, done)
            if not first and layer < self.dense:
                seen[:, :, : self.start] = True
            new = self.model.kv(layer, hidden, at)
            if first:
                self.own.append(new)
            else:
                old = self.own[layer]
                self.own[layer] = tuple(np.concatenate(two) for two in zip(old, new, strict=True))  # type: ignore[assignment]
                seen = np.concatenate([seen, blurred], axis=2)
            blurs = self._low(layer) if self.rank else self._means(layer)
            parts = [self.kv[layer], self.own[layer], *([] if first else [blurs])]
            whole = [np.concatenate(of) for of in zip(*parts, strict=True)]
            hidden = self.model.layer(layer, hidden, at, (whole[0], whole[1]), seen)

    def _means(self, layer: int) -> LayerKv:
        """The layer's keys and values [T, K, D], each token's its chunk's mean."""
        found = []
        for kind in self.kv[layer]:
            means = np.empty_like(kind)
            for head in range(HEADS):
                order = self.order[layer * HEADS + head]
                sums = np.add.reduceat(kind[order, head], self.edges)
                means[order, head] = np.repeat(sums / self.count[:, None], self.count, axis=0)
            found.append(means)
        return found[0], found[1]

    def _low(self, layer: int) -> LayerKv:
        """The layer's keys [T, K, D] by their best product before RoPE, and its values."""
        keys, at = self.kv[layer][0], np.arange(self.start)
        plain = self.model.rotated(keys, -at).reshape(len(keys), -1)
        u, s, v = np.linalg.svd(plain, full_matrices=False)
        low = (u[:, : self.rank] * s[: self.rank]) @ v[: self.rank]
        return self.model.rotated(low.reshape(keys.shape), at), self.kv[layer][1]

    def _odd(self, layer: int, head: int) -> np.ndarray:
        """The chunks with a key that is least like the mean."""
        keys, means = self.kv[layer][0][:, head], self._means(layer)[0][:, head]
        lengths = np.linalg.norm(keys, axis=1) * np.linalg.norm(means, axis=1)
        cosines = (keys * means).sum(1) / lengths
        least = np.minimum.reduceat(cosines[self.order[layer * HEADS + head]], self.edges)
        return np.argsort(least)[: self.outliers]

    def _seen(
        self, layer: int, hidden: np.ndarray, at: np.ndarray, done: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """[H, S, T]: every query head sees what its KV head chose, and the text up to itself; and
        [H, S, tokens of the prefix] those whose chunks it estimates."""
        q, keys = self.model.query(layer, hidden, at), self._means(layer)[0]
        group = q.shape[1] // HEADS
        seen = np.zeros((q.shape[1], len(at), self.start + done + len(at)), bool)
        seen[:, :, self.start :] = np.tri(len(at), done + len(at), done, dtype=bool)
        blurred = np.zeros((q.shape[1], len(at), self.start), bool)
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
            for last in {self.limit, self.limit + self.estimated} - {len(scores)}:
                gap = scores[ranked[last - 1]] - scores[ranked[last]]
                assert gap > 1e-5 * largest, "a tie: float32 may choose otherwise"
            best = np.sort(ranked[: self.limit])
            self.ids.append(best)
            held = {*self.steady, *(self._odd(layer, head).tolist() if self.outliers else [])}
            for chunk in best:
                own = not self.rank or not done or chunk in held
                (seen if own else blurred)[mine, :, order[self._tokens(chunk)]] = True
            for chunk in ranked[self.limit : self.limit + self.estimated]:
                blurred[mine, :, order[self._tokens(chunk)]] = True
        return seen, blurred

    def _tokens(self, chunk: int) -> slice:
        return slice(chunk * self.chunk, (chunk + 1) * self.chunk)
