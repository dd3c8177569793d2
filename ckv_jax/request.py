"""Requests and their outcomes: `Request`, `Blend`, `Result`, `Generation`, `TokenEvent`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ckv_jax.config import check_budget
from ckv_jax.errors import CkvError, WrongType, check_number, check_one_of
from ckv_jax.model.sampling import Logprobs
from ckv_jax.storage import chain
from ckv_jax.storage.layout import PLAIN
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

FinishReason = Literal["stop", "length", "cancelled", "deadline"]
Recompute = Literal["both", "attended", "first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Selects the tokens of `Request.documents` that are recomputed in their new context.

    Raises `ValueError` for a value out of range.
    """

    recompute: float = 0.2
    """Largest share of tokens to recompute, in [0, 1], of those that a layer attends to. Whole
    chunks are recomputed, at least one, of the documents after the first, whose own KV is exact. 0:
    none; 1 with a budget of 1: the answer of a dense prefill."""
    select: Recompute = "both"
    """Chunks to recompute: "attended", those that the question attends to most, averaged over all
    layers (ProphetKV, stage 1); "first", the first chunks of each document (EPIC, the baseline); or
    "both", the first chunk of each document, then the most attended."""

    def __post_init__(self) -> None:
        check_number("recompute", self.recompute)
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"got recompute={self.recompute}, expected a share in [0, 1]")
        check_one_of("select", self.select, Recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One suffix over one stored prefix, or over several concatenated documents.

    Raises `ValueError` for a value out of range or an empty suffix, `TypeError` for a wrong type.
    """

    prefix: Prefix | str | Sequence[int] | None = None
    """A handle from `Engine.ingest`, its id or name, or token ids, whose longest stored prefix is
    used. None if `documents` are given."""
    documents: Sequence[Prefix | str] | None = None
    """Stored prefixes in place of `prefix`, each a handle, an id or a name, concatenated in this
    order. Their keys are rotated to the new positions, and `blend` sets how much is recomputed. The
    combined KV is not stored."""
    blend: Blend = Blend()
    """The tokens of `documents` to recompute."""
    suffix: str | Sequence[int] | np.ndarray
    """Text or token ids (int [S]), such as those of `Engine.question`."""
    budget: float | str | None = None
    """Share of the prefix to attend to, in (0, 1]. "mass:0.9" selects in every period as many
    chunks as hold 90% of the selecting queries' attention to what is not always kept;
    "mass:0.9:0.05-0.5" does so within 5 to 50% of the chunks. None: the engine's budget."""
    id: str | None = None
    """The caller's name of the request, unique within one call, returned with the outcome."""
    deadline_s: float | None = None
    """Seconds from submission after which the request is cancelled."""
    attention: bool = False
    """Whether `Result.attention` is computed."""
    salt: str | None = None
    """The tenant's salt; the request sees only prefixes of this tenant. None: the engine's."""

    def __post_init__(self) -> None:
        if self.budget is not None:
            check_budget(self.budget)
        if self.documents is not None:
            self._check_documents()
        elif not isinstance(self.prefix, Prefix) and not hasattr(self.prefix, "__len__"):
            raise TypeError(f"got prefix={self.prefix!r}, expected a Prefix, its id, or token ids")
        if not hasattr(self.suffix, "__len__"):
            raise TypeError(f"got suffix={self.suffix!r}, expected text or token ids")
        if len(self.suffix) == 0:
            raise ValueError("got an empty suffix, expected a text or at least one token")
        if self.id is not None and not isinstance(self.id, str):
            raise WrongType(f"got id={self.id!r}, expected a text")
        if self.deadline_s is not None:
            check_number("deadline_s", self.deadline_s)
            if not self.deadline_s > 0:
                raise ValueError(f"got deadline_s={self.deadline_s}, expected more than 0 seconds")
        if self.salt is not None:
            chain.check_salt(self.salt)

    def _check_documents(self) -> None:
        if self.prefix is not None:
            raise ValueError("got both prefix and documents, expected one of them")
        if isinstance(self.documents, (str, Prefix)) or not isinstance(self.documents, Sequence):
            raise TypeError(
                f"got documents={self.documents!r}, expected a list of Prefix or their ids"
            )
        for one in self.documents:
            if not isinstance(one, (str, Prefix)):
                raise TypeError(f"got {one!r} among documents, expected a Prefix or its id")
        if not self.documents:
            raise ValueError("got no documents, expected at least one stored prefix")
        if not isinstance(self.blend, Blend):
            raise TypeError(f"got blend={self.blend!r}, expected a Blend")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAnswer:
    """The first token after one suffix, with its logits float32 [V]."""

    token_id: int
    text: str
    logits: np.ndarray
    codec: str = PLAIN
    """See `Result.codec`."""
    attention: np.ndarray | None = None
    """See `Result.attention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The outcome of one request: an answer or an error, which affects no other request."""

    request: Request
    """The request."""
    trace: Trace
    """Trace of the request's batch until the first token, with the request's own chunks and
    attention mass; `Trace.tokens` has the tokens after it."""
    queued_ms: float = 0.0
    """Milliseconds from submission until the batch began; not part of the trace's time to first
    token."""
    error: CkvError | ValueError | None = None
    """The error of the request; None if it succeeded."""

    def raise_for_error(self) -> None:
        """Raises `error`, if there is one."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(_Outcome):
    """The first token of one request, or its error.

    If the request failed, `error` has the reason, and `token_id`, `text` and `logits` raise it.
    """

    answer: FirstAnswer | None = field(default=None, repr=False)
    """The values of `token_id`, `text`, `logits` and `codec`; None with an error."""

    @property
    def token_id(self) -> int:
        """Id of the likeliest token."""
        return self._answer().token_id

    @property
    def text(self) -> str:
        """The decoded token; empty without a tokenizer."""
        return self._answer().text

    @property
    def logits(self) -> np.ndarray:
        """Logits of the first token, float32 [V]."""
        return self._answer().logits

    @property
    def codec(self) -> str:
        """Name and version of the codec of the stored KV. At a budget of 1 the answer is exact up
        to this codec; "none": bit-exact."""
        return self._answer().codec

    @property
    def attention(self) -> np.ndarray | None:
        """Share of the selecting queries' attention on each chunk of the prefix, float32 [M], the
        mean over selections. None without `Request.attention`, without stored chunks, and where the
        system scores no chunks."""
        return self._answer().attention

    def __str__(self) -> str:
        """Formats the token and its cost, or the error, as one line."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        return f"{self.text!r} (token {self.token_id}); {self.trace}"

    def _answer(self) -> FirstAnswer:
        self.raise_for_error()
        assert self.answer is not None
        return self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The generated tokens after one suffix, with the prefix and the suffix."""

    token_ids: np.ndarray
    """Generated token ids, int32 [n]; a stop token that ended the generation is the last."""
    text: str
    """The decoded tokens, without stop tokens and stop strings; empty without a tokenizer."""
    finish_reason: FinishReason
    """Why the generation ended, see `Generation.finish_reason`."""
    prefix: Prefix
    """The stored part of the request's prefix."""
    suffix: np.ndarray
    """Tokens after `prefix` that were computed before the generation, int32 [S]."""
    budget: float | str
    """The budget that was used, see `Request.budget`."""
    kv: np.ndarray | None = field(default=None, repr=False)
    """KV of suffix and generation, [L, 2, S + n, K, D] in the layout's element type; None without
    `keep_kv`, and if the generation was cancelled or late while it waited for lost KV."""
    logprobs: tuple[Logprobs, ...] = ()
    """Log probabilities of each token; empty without `SamplingParams.logprobs`."""
    documents: tuple[Prefix, ...] = ()
    """The documents of the request; then `prefix` is empty."""
    stopped_by: str | None = None
    """The stop string that ended the text, if one has."""

    @property
    def tokens(self) -> np.ndarray:
        """All token ids, int32 [T]: prefix or documents, suffix and generation."""
        before = [one.tokens for one in self.documents or (self.prefix,)]
        return np.concatenate([*before, self.suffix, self.token_ids]).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(_Outcome):
    """The generated tokens of one request, or its error.

    If the request failed, `error` has the reason, and `token_ids`, `text` and `finish_reason` raise
    it.
    """

    decode_ms: float = 0.0
    """Milliseconds from the first token to the last."""
    answer: Completion | None = field(default=None, repr=False)
    """The values of `token_ids`, `text` and `finish_reason`; None with an error."""

    @property
    def token_ids(self) -> np.ndarray:
        """Generated token ids, int32 [n]; a stop token that ended the generation is the last."""
        return self.completion().token_ids

    @property
    def text(self) -> str:
        """The decoded tokens, without stop tokens and stop strings; empty without a tokenizer."""
        return self.completion().text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the generation ended: "stop" (a stop token or stop string), "length" (`max_tokens`),
        "cancelled" or "deadline"."""
        return self.completion().finish_reason

    @property
    def codec(self) -> str:
        """See `Result.codec`."""
        answer = self.completion()
        prefix = answer.prefix
        return prefix.layout.codec if answer.documents or prefix.num_tokens else PLAIN

    def __str__(self) -> str:
        """Formats the text and its cost, or the error, as one line."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        count = len(self.token_ids)
        rate = f", {1e3 * (count - 1) / self.decode_ms:.1f} tokens/s" if self.decode_ms else ""
        return f"{self.text!r} ({count} tokens, {self.finish_reason}{rate}); {self.trace}"

    def completion(self) -> Completion:
        """Returns the whole answer; raises `error` if the request failed."""
        self.raise_for_error()
        assert self.answer is not None
        return self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One token of a stream.

    The texts of a request's events, joined, are the text of its generation. The last event has the
    generation.
    """

    index: int
    """Position of the request in the call."""
    request: Request
    """The request."""
    token_id: int | None = None
    """Token id; None for an event that only ends the generation."""
    text: str = ""
    """New text that later tokens cannot change: often empty or one word."""
    logprobs: Logprobs | None = None
    """Log probabilities of the token, if requested; None for a token that ends the generation."""
    generation: Generation | None = None
    """The whole generation, in the last event; else None."""

    def __str__(self) -> str:
        return self.text
