"""Decode windows against a model of dictionaries, with any traffic."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.baselines.decoding import lfu, lru
from ckv_jax.baselines.window_widths import empty_window
from ckv_jax.decode.window import CLOSED, FREE, Keep, StepSelection, advance, lookahead
from ckv_jax.kernels_pallas.target import Target

ROWS, SELECTED, CHUNKS = 3, 4, 24
KEEP: dict[str, Keep] = {"lru": lru, "lfu": lfu, "lookahead": lookahead}


class Model:
    """One row: chunk -> [slot, last step, uses]."""

    def __init__(self, width: int, keep: str) -> None:
        self.residents: dict[int, list[int]] = {}
        self.free = list(range(width))
        self.keep = keep

    def advance(self, ids: list[int], scores: np.ndarray, step: int) -> tuple[list[int], list[int]]:
        """(slot of each id, missing chunks or -1); the lowest by (worth, last, slot) leave."""

        def worth(chunk: int) -> tuple[float, int, int]:
            slot, last, uses = self.residents[chunk]
            if self.keep == "lfu":
                return uses, last, slot
            if self.keep == "lookahead":
                return scores[chunk], last, slot
            return -np.inf, last, slot

        others = sorted((c for c in self.residents if c not in ids), key=worth)
        missing = [chunk if chunk not in self.residents else -1 for chunk in ids]
        for chunk in ids:
            if chunk in self.residents:
                self.residents[chunk][1:] = [step, self.residents[chunk][2] + 1]
                continue
            slot = self.free.pop(0) if self.free else self.residents.pop(others.pop(0))[0]
            self.residents[chunk] = [slot, step, 1]
        return [self.residents[chunk][0] for chunk in ids], missing


def draw(rng: np.random.Generator, sticky: float, before: np.ndarray | None) -> np.ndarray:
    """Scores [R, M] without equals, near the last ones; selected are the best of a row."""
    fresh = rng.permuted(np.tile(np.arange(1.0, CHUNKS + 1), (ROWS, 1)), axis=1)
    if before is None:
        return fresh
    mixed = sticky * before + (1 - sticky) * fresh
    return mixed.argsort(1).argsort(1) + 1.0


def selection_of(scores: np.ndarray, limits: np.ndarray) -> StepSelection:
    ids = np.full((ROWS, SELECTED), -1, np.int32)
    for row, limit in enumerate(limits):
        ids[row, :limit] = np.sort(np.argsort(-scores[row])[:limit])
    return StepSelection(jnp.asarray(ids), jnp.asarray(scores, jnp.float32))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    keep=st.sampled_from([*KEEP]),
    slots=st.sampled_from([SELECTED, 7, 12]),
    sticky=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    target=st.sampled_from([None, Target(platform="cpu")]),
)
def test_agrees_with_dictionaries(
    seed: int, keep: str, slots: int, sticky: float, target: Target | None
) -> None:
    rng = np.random.default_rng(seed)
    widths = rng.integers(1, slots + 1, ROWS)
    limits = np.minimum(rng.integers(1, SELECTED + 1, ROWS), widths)
    window = empty_window(widths, slots)
    models = [Model(int(width), keep) for width in widths]
    scores = None
    for step in range(25):
        scores = draw(rng, sticky, scores)
        now = np.minimum(rng.integers(0, SELECTED + 1, ROWS), limits)  # a row may select nothing
        selection = selection_of(scores, now)
        window, moves = advance(window, selection, jnp.int32(step), KEEP[keep], target)
        chunk, last, uses = map(np.asarray, window)
        for row, model in enumerate(models):
            ids = np.asarray(selection.ids)[row, : now[row]].tolist()
            slots_, missing = model.advance(ids, scores[row].astype(np.float32), step)
            rest = [-1] * (SELECTED - now[row])
            assert moves.table[row].tolist() == slots_ + rest
            assert moves.misses[row].tolist() == missing + rest
            held = {int(c): [s, int(last[row, s]), int(uses[row, s])]
                    for s, c in enumerate(chunk[row]) if c >= 0}  # fmt: skip
            assert held == model.residents
            assert (chunk[row, : widths[row]] >= FREE).all()
            assert (chunk[row, widths[row] :] == CLOSED).all()
