"""Decode in numpy over one stored prefix: chunks that all heads of a layer select together, or that
every KV head chooses by the means of its own chunks' keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from engine_sharp import MODEL
from numpy_qwen import LayerKv, NumpyQwen, softmax

from ckv_jax import Engine
from ckv_jax.baselines.decoding import heads_apart
from ckv_jax.baselines.window_widths import ProfiledSelections
from ckv_jax.config import OwnParts
from ckv_jax.selection.select import NOTHING, Select
from ckv_jax.storage.prefix import Prefix
from ckv_jax.systems import SYSTEMS

HEADS = MODEL.num_kv_heads
KVDRIVE = SYSTEMS["kvdrive"]
BY_POSITION = dataclasses.replace(
    KVDRIVE, own=OwnParts(layout=heads_apart, decoding=ProfiledSelections), always=NOTHING,
    window=2.0,
)  # fmt: skip
SHARED = dataclasses.replace(
    BY_POSITION, period=4, subperiod=2, pack_layers=2, decode=Select(queries=3)
)
"""Layers share selections, and tokens: each head's own."""


class Decode:
    """A question over a prefix, and the tokens after it. Subclasses say what a layer sees."""

    def __init__(
        self, model: NumpyQwen, prefix: np.ndarray, chunk: int, budget: float,
        kv: list[LayerKv] | None = None,
    ) -> None:  # fmt: skip
        """`prefix`: its tokens; `kv`: their keys and values, where they are known."""
        self.model = model
        self.kv = model.prefill(prefix) if kv is None else kv
        self.start = len(prefix)
        self.chunk = chunk
        self.edges = np.arange(0, self.start, chunk)
        self.count = np.diff([*self.edges, self.start])
        self.limit = math.ceil(budget * len(self.edges))
        self.own: list[LayerKv] = []
        self.entered: list[np.ndarray] = []
        """Hidden states that entered the layers so far, of the latest step."""

    def seen(self, layer: int, at: np.ndarray, done: int) -> tuple[np.ndarray, Sequence[LayerKv]]:
        """What tokens at these positions see, [S, T] or [H, S, T]: of the prefix, of the `done`
        tokens after it and of themselves; and of keys and values behind those."""
        raise NotImplementedError

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Goes on by tokens int [n]; the first of all are the question. Hidden states [n, E]."""
        done = len(self.own[0][0]) if self.own else 0
        at = self.start + done + np.arange(len(ids))
        hidden, self.entered = self.model.embed(ids), []
        for layer in range(MODEL.num_layers):
            self.entered.append(hidden)
            seen, more = self.seen(layer, at, done)
            new = self.model.kv(layer, hidden, at)
            if not done:
                self.own.append(new)
            else:
                old = self.own[layer]
                self.own[layer] = np.concatenate([old[0], new[0]]), np.concatenate([old[1], new[1]])
            keys, values = zip(self.kv[layer], self.own[layer], *more, strict=True)
            whole = np.concatenate(keys), np.concatenate(values)
            hidden = self.model.layer(layer, hidden, at, whole, seen)
        return hidden

    def text(self, at: np.ndarray, done: int) -> np.ndarray:
        """bool [S, T]: tokens at these positions see what comes after the prefix, up to
        themselves."""
        seen = np.zeros((len(at), self.start + done + len(at)), bool)
        seen[:, self.start :] = np.tri(len(at), done + len(at), done, dtype=bool)
        return seen

    def tokens(self, chunk: int) -> slice:
        """The places of a chunk's tokens."""
        return slice(chunk * self.chunk, min(self.start, (chunk + 1) * self.chunk))


class Oracle(Decode):
    """Every head chooses for itself. Chunks that are estimated take part as so many tokens with
    their mean key and value; of low rank, those that are chosen by their score do with the keys of
    that rank."""

    def __init__(
        self, model: NumpyQwen, engine: Engine, prefix: Prefix, *, budget: float, outliers: int = 0,
        estimated: int = 0, dense: int = 0, rank: int = 0,
    ) -> None:  # fmt: skip
        """`outliers`, `estimated`: chunks of each head; `dense`: layers from the first one on that
        attend to everything once the question is through; `rank`: of keys, 0: their own."""
        super().__init__(model, prefix.tokens, prefix.layout.chunk_tokens, budget)
        self.limit += outliers
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
        self.ids: list[np.ndarray] = []
        """Of each layer and head, of the latest token."""

    def step(self, ids: np.ndarray) -> np.ndarray:
        """Goes on by tokens that choose together; the first ones estimate nothing."""
        self.ids = []
        return super().step(ids)

    def seen(self, layer: int, at: np.ndarray, done: int) -> tuple[np.ndarray, Sequence[LayerKv]]:
        """Every query head sees what its KV head chose; and the tokens whose chunks it estimates,
        behind all others."""
        q, keys = self.model.query(layer, self.entered[layer], at), self._means(layer)[0]
        group = q.shape[1] // HEADS
        seen = np.tile(self.text(at, done), (q.shape[1], 1, 1))
        blurred = np.zeros((q.shape[1], len(at), self.start), bool)
        for head in range(HEADS):
            mine = slice(head * group, (head + 1) * group)
            order = self.order[layer * HEADS + head]
            means = keys[order[self.edges], head]  # [M, D]
            logits = np.einsum("sgd,md->sgm", q[:, mine], means) * MODEL.head_dim**-0.5
            scores = softmax(logits + np.log(self.count)).sum(axis=(0, 1))
            largest = scores.max()
            odd = self._odd(layer, head)
            scores[self.steady] += len(at) * group
            scores[odd] += len(at) * group
            ranked = np.argsort(-scores)
            for last in {self.limit, self.limit + self.estimated} - {len(scores)}:
                gap = scores[ranked[last - 1]] - scores[ranked[last]]
                assert gap > 1e-5 * largest, "a tie: float32 may choose otherwise"
            self.ids.append(np.sort(ranked[: self.limit]))
            held = {*self.steady, *odd.tolist()}
            for chunk in self.ids[-1]:
                own = not self.rank or not done or chunk in held
                (seen if own else blurred)[mine, :, order[self.tokens(chunk)]] = True
            for chunk in ranked[self.limit : self.limit + self.estimated]:
                blurred[mine, :, order[self.tokens(chunk)]] = True
        if not done:
            return seen, ()
        if layer < self.dense:
            seen[:, :, : self.start] = True
        blurs = self._low(layer) if self.rank else self._means(layer)
        return np.concatenate([seen, blurred], axis=2), (blurs,)

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
