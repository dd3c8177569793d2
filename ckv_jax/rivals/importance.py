"""How important each token has been in each layer, and the order that follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckv_jax.storage.prefix import Prefix

_FRONT = 0.25  # share of the tokens that an order is judged by: IMPRESS's own budget
_SETTLED = 0.9  # share of those that are in front already


class AverageImportance:
    """The mean share of a layer's attention that each token got, float64 [L, T], over requests.

    Requests count alike, however many heads were scored in a layer.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        self._total = np.zeros((layers, tokens))

    def add(self, importance: Sequence[np.ndarray], order: np.ndarray | None) -> None:
        """One request's attention, [>= T] for each layer; `order` int [L, T]: the position of each
        token, None: as it is."""
        tokens = self._total.shape[1]
        for layer, values in enumerate(importance):
            share = np.asarray(values, np.float64)[:tokens]
            share = share / max(float(share.sum()), np.finfo(np.float64).tiny)
            self._total[layer, slice(None) if order is None else order[layer]] += share

    def order(self, start: int, end: int) -> np.ndarray:
        """The tokens from `start` up to `end`, counted from there, the most important first, int32
        [L, end - start]; the earlier one of equals."""
        order: np.ndarray = np.argsort(-self._total[:, start:end], axis=1, kind="stable")
        return order.astype(np.int32)

    def settled(self, order: np.ndarray, prefix: Prefix) -> bool:
        """Whether nine in ten of the most important quarter of each segment's tokens are in its
        first quarter as `order` int [L, T] has them, averaged over layers and segments."""
        there, start = [], 0
        for span in prefix.spans:
            end = min(start + span.num_chunks * prefix.layout.chunk_tokens, prefix.num_tokens)
            front = max(1, round(_FRONT * (end - start)))
            best = self.order(start, end)[:, :front] + start
            held = order[:, start : start + front]
            there += [
                len(np.intersect1d(wanted, found)) / front
                for wanted, found in zip(best, held, strict=True)
            ]
            start = end
        return float(np.mean(there)) >= _SETTLED
