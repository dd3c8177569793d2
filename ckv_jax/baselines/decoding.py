"""Decode as published systems do it, in place of the core's (`decode/selection.py`).

All but KVDrive read packs once every row has selected. Their windows keep by age or by use, or keep
nothing between tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from ckv_jax.decode.eviction import StepSelection, Window
from ckv_jax.decode.selection import DecodeSelection, DecodeSelections
from ckv_jax.selection.select import Ends

ENDS = Ends(first=4, last=64)
"""Sink tokens and local ones that every sparse system attends to beside its budget (KVDrive §9.1).
Whole chunks are kept: 8 or 16 tokens at the beginning, 64 and what shares a chunk with them."""


def decoding(made: type[DecodeSelection], **fields: Any) -> partial[DecodeSelections]:
    """For `OwnParts.decoding`: batches of one kind, with what it takes beside a context."""
    return partial(DecodeSelections, made=partial(made, **fields))


class SelectFirst(DecodeSelection):
    """All rows of a period select before packs are read for any."""

    looks_up = False

    def _demand_all(self, period: int) -> None:
        for call in self._calls[period]:
            assert call.found is not None
            call.found.record.block_until_ready()
        super()._demand_all(period)


class HoldNothing(SelectFirst):
    """Nothing stays on the device between tokens but what the caches keep."""

    def begin(self, batch: int) -> None:
        """Windows begin empty, see `DecodeSelection.begin`."""
        for selector in self.rows.values():
            selector.window.forget()
        super().begin(batch)

    def _collect(self, period: int) -> None:
        empty = self._on_device[period]
        super()._collect(period)
        self._on_device[period] = empty


def lru(now: Array, window: Window, selection: StepSelection) -> Array:
    """Least recently used first: all are worth the same, so that age decides."""
    return jnp.zeros_like(now)


def lfu(now: Array, window: Window, selection: StepSelection) -> Array:
    """Least frequently used since it came first; of equals the least recently used."""
    return window.uses.astype(jnp.float32)
