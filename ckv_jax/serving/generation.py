"""What a generation is told beyond its request, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ckv_jax.errors import CkvError
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Placed, Request
from ckv_jax.trace import Trace
from ckv_jax.validate import check_whole

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """How one request goes on after its first token."""

    params: SamplingParams
    reselect_every: int = 0
    """Choose the chunks again after so many tokens; 0: never."""
    keep_kv: bool = False
    """Keep the keys and values of suffix and text, for `Engine.append`."""

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"got {type(self.params).__name__}, expected SamplingParams")
        check_whole("reselect_every", self.reselect_every, least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The text after one suffix."""

    token_ids: np.ndarray
    text: str
    finish_reason: FinishReason
    placed: Placed
    kv: np.ndarray | None = field(default=None, repr=False)
    """[L, 2, suffix + tokens, K, D] in the layout's element type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The text that one request led to, or what was wrong with it.

    A request's own fault is in `error` and fails nothing else; `token_ids`, `text` and
    `finish_reason` of such a generation raise it, so that it cannot be overlooked.
    """

    request: Request
    trace: Trace
    """Until the first token; see `Result.trace`."""
    queued_ms: float = 0.0
    decode_ms: float = 0.0
    """From the first token to the last."""
    error: CkvError | ValueError | None = None
    answer: Completion | None = field(default=None, repr=False)

    def raise_for_error(self) -> None:
        """Raises `error`, if there is one."""
        if self.error is not None:
            raise self.error

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [n]; a stop token that ended it is the last."""
        return self.completion().token_ids

    @property
    def text(self) -> str:
        """The tokens decoded, without stop tokens and stop strings; empty without a tokenizer."""
        return self.completion().text

    @property
    def finish_reason(self) -> FinishReason:
        """ "stop": a stop token or string; "length": `max_tokens`; "cancelled"; "deadline"."""
        return self.completion().finish_reason

    def completion(self) -> Completion:
        """The answer as a whole."""
        self.raise_for_error()
        assert self.answer is not None
        return self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One step of a token stream.

    Texts of one request joined are its generation's text. Its last event has the generation.
    """

    index: int
    """Place of the request in the call."""
    request: Request
    token_id: int | None = None
    text: str = ""
    """What is certain by now: often empty or one word."""
    generation: Generation | None = None
