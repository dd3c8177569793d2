"""Decode over more than the device holds: a row's packs come through the pool for every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from jax import Array

from ckv_jax.buckets import chunk_bucket
from ckv_jax.decode.window import Window
from ckv_jax.pipeline.layers import LayerKv, Layers
from ckv_jax.pipeline.piecewise import Piecewise
from ckv_jax.pipeline.plan import Plan, Step
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.packs import Packs


class Streaming:
    """Runs the steps of a single row whose window is not held. Engine thread only.

    While a step computes, the packs of the next one are read, where the pool has room for four
    such steps (FlexGen's schedule of one batch).
    """

    def __init__(
        self, layers: Layers, memory: Memory, plan: Plan, packs: Callable[[], Packs]
    ) -> None:
        """`packs`: opens the packs of the row's prefix, for one token."""
        self._layers = layers
        self._memory = memory
        self._plan = plan
        self._open = packs
        self._pieces = Piecewise(layers, memory)
        self._packs: Packs | None = None

    @contextmanager
    def token(self) -> Iterator[None]:
        """All steps of one token run within this."""
        with self._open() as packs:
            self._packs = packs
            try:
                yield
            finally:
                self._packs = None

    def run(
        self, step: Step, window: Window, hidden: Array, start: np.ndarray, at: np.ndarray,
        buffers: LayerKv, *, selects: bool,
    ) -> tuple[Array, LayerKv]:  # fmt: skip
        """`Layers.extend` of a step over the packs of row 0.

        `selects`: each period has its own selection, which is not known before that period.
        """
        packs, plan = self._packs, self._plan
        assert packs is not None
        choices = plan.choices_of(step.period)
        size = chunk_bucket(max(len(window.ids(choice)) for choice in choices))
        chosen = np.full((plan.parts, len(at), size), -1, np.int32)
        lengths = np.zeros(chosen.shape, np.int32)
        for part, choice in enumerate(choices):
            ids = window.ids(choice)
            chosen[part, 0, : len(ids)] = ids
            lengths[part, 0, : len(ids)] = window.lengths(choice)
        if not self._fits(step, window):
            owners = np.where(np.arange(len(at)) == 0, 0, -1)
            return self._pieces.run(
                start, packs, step, chosen, lengths, owners, hidden, buffers=buffers, at=at
            )
        then = self._following(step, window, selects)
        slots = np.full((len(step.groups), len(at), size), -1, np.int32)
        for group in step.groups:
            packs.demand(0, group, window.ids(plan.choice_of(step, group)))
        for place, group in enumerate(step.groups):
            ids = window.ids(plan.choice_of(step, group))
            slots[place, 0, : len(ids)] = packs.collect(0, group, ids)
        for other in then:
            for group in other.groups:
                packs.ahead(0, group, window.ids(plan.choice_of(other, group)), sure=True)
        hidden, buffers = self._layers.extend(
            step.layers, hidden, start, buffers, at, self._memory.pool.pages, slots,
            lengths if plan.parts > 1 else lengths[0], context=buffers[0][0].shape[1],
        )  # fmt: skip
        for group in step.groups:
            packs.give_up(0, group, hidden)
        return hidden, buffers

    def _following(self, step: Step, window: Window, selects: bool) -> list[Step]:
        """The step after this one, if it is known what that attends to, and the pool has room for
        its packs."""
        return [
            then
            for then in self._plan.steps[step.index + 1 : step.index + 2]
            if (then.period == step.period or not selects) and self._fits(then, window)
        ]

    def _fits(self, step: Step, window: Window) -> bool:
        """Whether the pool has room for all packs of a step."""
        ids = (window.ids(self._plan.choice_of(step, group)) for group in step.groups)
        return sum(map(len, ids)) <= self._memory.step_slots
