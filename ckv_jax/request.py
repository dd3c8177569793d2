"""What is asked of an engine, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckv_jax.config import check_budget
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One suffix over one prefix."""

    prefix: Prefix | str | Sequence[int]
    """A handle from `Engine.ingest`, its id, or token ids of which as much is used as is stored."""
    suffix: str | Sequence[int]
    """Text, or token ids."""
    budget: float | None = None
    """Share of the prefix in (0, 1]; None: the engine's."""
    id: str | None = None
    """A name of the caller's, given back in the result."""

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_budget(self.budget)
        if len(self.suffix) == 0:
            raise ValueError("got an empty suffix, expected text or at least one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The first token of one request."""

    request: Request
    token_id: int
    text: str
    """The token decoded; empty without a tokenizer."""
    logits: np.ndarray
    """float32 [V]."""
    trace: Trace
