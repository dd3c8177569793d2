"""What is asked of an engine, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from ckv_jax.config import check_budget
from ckv_jax.errors import CkvError, WrongType, check_number
from ckv_jax.model.sampling import Logprobs
from ckv_jax.storage import chain
from ckv_jax.storage.layout import PLAIN
from ckv_jax.storage.prefix import Prefix
from ckv_jax.trace import Trace

FinishReason = Literal["stop", "length", "cancelled", "deadline"]
Recompute = Literal["both", "attended", "first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """What of `Request.documents` is computed again."""

    recompute: float = 0.2
    """Tokens computed again at most, in [0, 1], as a share of those that a layer attends to: whole
    chunks, at least one, of the documents after the first, whose own keys and values are exact. 0:
    none; 1, with a budget of 1: the answer of a dense prefill."""
    select: Recompute = "both"
    """Which: "attended", the chunks that the question attends to most, averaged over all layers
    (ProphetKV, stage 1); "first", the first chunks of each document (EPIC, the baseline); or
    "both", the first chunk of each document, where texts meet, and then the most attended."""

    def __post_init__(self) -> None:
        check_number("recompute", self.recompute)
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"got recompute={self.recompute}, expected a share in [0, 1]")
        if self.select not in get_args(Recompute):
            raise ValueError(
                f"got select={self.select!r}, expected one of {', '.join(get_args(Recompute))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One suffix over one prefix, or over several put one after the other."""

    prefix: Prefix | str | Sequence[int] | None = None
    """A handle from `Engine.ingest`, its id or name, or token ids of which as much is used as is
    stored; None: there are `documents`."""
    documents: Sequence[Prefix | str] | None = None
    """In place of a prefix: stored prefixes, each a handle, an id or a name, in the order in which
    their texts are to be read. Their keys are moved to their places, and `blend` says how much is
    computed again. Nothing of it is stored."""
    blend: Blend = Blend()
    """What of the `documents` is computed again."""
    suffix: str | Sequence[int] | np.ndarray
    """Text, or token ids, such as those of `Engine.question`."""
    budget: float | str | None = None
    """Share of the prefix in (0, 1]; or "mass:0.95": in every period as many chunks as hold that
    share of the attention of the queries that select, "mass:0.95:0.02-0.5": between two and fifty
    in a hundred. None: the engine's."""
    id: str | None = None
    """A name of the caller's, unique within one call, given back in the result."""
    deadline_s: float | None = None
    """Seconds from submission after which the request is given up."""
    attention: bool = False
    """Whether a `Result` has the attention that each chunk of the prefix got."""
    salt: str | None = None
    """The tenant who asks, whose prefixes alone exist for it; None: the engine's."""

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
            raise ValueError("got an empty suffix, expected text or at least one token")
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
    """The first token after one suffix."""

    token_id: int
    text: str
    logits: np.ndarray
    codec: str = PLAIN
    """See `Result.codec`."""
    attention: np.ndarray | None = None
    """See `Result.attention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What came of one request: an answer, or an error that fails no other."""

    request: Request
    """What was asked."""
    trace: Trace
    """Of the batch that the request was in until the first token, with the request's own chunks and
    attention mass; `tokens` has those after it."""
    queued_ms: float = 0.0
    """From submission until its batch began; not part of the trace's time to first token."""
    error: CkvError | ValueError | None = None
    """What was wrong with the request; None: nothing."""

    def raise_for_error(self) -> None:
        """Raises `error`, if there is one."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(_Outcome):
    """The first token of one request, or what was wrong with it.

    A request's own fault is in `error` and fails nothing else; `token_id`, `text` and `logits` of
    such a result raise it, so that it cannot be overlooked.
    """

    answer: FirstAnswer | None = field(default=None, repr=False)
    """What `token_id`, `text`, `logits` and `codec` read; None beside an error."""

    @property
    def token_id(self) -> int:
        """The likeliest token."""
        return self._answer().token_id

    @property
    def text(self) -> str:
        """The token decoded; empty without a tokenizer."""
        return self._answer().text

    @property
    def logits(self) -> np.ndarray:
        """float32 [V]."""
        return self._answer().logits

    @property
    def codec(self) -> str:
        """What the stored KV was encoded with, name and version: at a budget of 1 the answer is
        exact up to that. "none": to the last bit."""
        return self._answer().codec

    @property
    def attention(self) -> np.ndarray | None:
        """float32 [M]: the share of the attention of the queries that select which each chunk of
        the prefix got, the mean over selections. None where `Request.attention` did not ask for it,
        nothing is stored, or the system scores no chunks."""
        return self._answer().attention

    def __str__(self) -> str:
        """One line for people: the token and what it took, or what was wrong."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        return f"{self.text!r} (token {self.token_id}); {self.trace}"

    def _answer(self) -> FirstAnswer:
        self.raise_for_error()
        assert self.answer is not None
        return self.answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What was generated after one suffix, and over what."""

    token_ids: np.ndarray
    """int32 [n]; a stop token that ended it is the last."""
    text: str
    """The tokens decoded, without stop tokens and stop strings; empty without a tokenizer."""
    finish_reason: FinishReason
    """Why it ended, see `Generation.finish_reason`."""
    prefix: Prefix
    """As much of the request's prefix as was stored."""
    suffix: np.ndarray
    """int32 [S]: everything after it that was computed before the generation."""
    budget: float | str
    """The one that it was made with, see `Request.budget`."""
    kv: np.ndarray | None = field(default=None, repr=False)
    """[L, 2, suffix + tokens, K, D] in the layout's element type, if it was to be kept."""
    logprobs: tuple[Logprobs, ...] = ()
    """One for each token, if `SamplingParams.logprobs` asked for them."""
    documents: tuple[Prefix, ...] = ()
    """Those of the request, in place of a prefix, which is empty then."""

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]: of the prefix, or the documents, of the suffix and of the generation."""
        before = [one.tokens for one in self.documents or (self.prefix,)]
        return np.concatenate([*before, self.suffix, self.token_ids]).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(_Outcome):
    """What was generated for one request, or what was wrong with it.

    A request's own fault is in `error` and fails nothing else; `token_ids`, `text` and
    `finish_reason` of such a generation raise it, so that it cannot be overlooked.
    """

    decode_ms: float = 0.0
    """From the first token to the last."""
    answer: Completion | None = field(default=None, repr=False)
    """What `token_ids`, `text` and `finish_reason` read; None beside an error."""

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

    @property
    def codec(self) -> str:
        """See `Result.codec`."""
        answer = self.completion()
        prefix = answer.prefix
        return prefix.layout.codec if answer.documents or prefix.num_tokens else PLAIN

    def __str__(self) -> str:
        """The text and what it took, or what was wrong."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        count = len(self.token_ids)
        rate = f", {1e3 * (count - 1) / self.decode_ms:.1f} tokens/s" if self.decode_ms else ""
        return f"{self.text!r} ({count} tokens, {self.finish_reason}{rate}); {self.trace}"

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
    """The request itself."""
    token_id: int | None = None
    """The token; None with an event that only ends the generation."""
    text: str = ""
    """What is certain by now: often empty or one word."""
    logprobs: Logprobs | None = None
    """The token's, if they were asked for; none of a token that ends the generation."""
    generation: Generation | None = None
    """With the last event: the whole of it."""

    def __str__(self) -> str:
        """The text that is certain by now."""
        return self.text
