"""From the tokens of one generation to its text, and to the token that ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ckv_jax.model.sampling import SamplingParams
from ckv_jax.model.stream import TextStream
from ckv_jax.model.tokenizer import Tokenizer


class Text:
    """The text of one generation as it comes; empty without a tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        end_ids: Collection[int],
        *,
        after: Sequence[int] = (),
    ) -> None:
        """`after`: the last tokens of the prompt."""
        self._stream = TextStream(tokenizer, stop=params.stop, after=after) if tokenizer else None
        self._end_ids = set(params.stop_token_ids)
        self._hidden_ids = set(end_ids)
        if not params.ignore_eos:
            self._end_ids |= self._hidden_ids
        self._matcher = None if params.grammar is None else params.grammar.matcher()
        self._min_tokens = params.min_tokens
        self._tokens = 0

    @property
    def text(self) -> str:
        """Everything so far, without stop tokens and stop strings."""
        return self._stream.text if self._stream is not None else ""

    def ends(self, token: int) -> bool:
        """Whether a token ends the text and is no part of it."""
        return token in self._end_ids

    @property
    def barred(self) -> Collection[int]:
        """Ids that may not come next, as the text would be too short."""
        return self._end_ids if self._tokens < self._min_tokens else ()

    def allowed(self, size: int) -> np.ndarray | None:
        """Which of `size` ids a grammar lets come next, bool [V]; None: there is none."""
        if self._matcher is None:
            return None
        return self._matcher.allowed(size, list(self._end_ids))

    def push(self, token: int) -> tuple[str, bool]:
        """(what of the text is certain now and was not before, whether the text ends here)."""
        self._tokens += 1
        if self.ends(token):
            return "", True
        complete = self._matcher is not None and self._matcher.push(token)
        if self._stream is None or token in self._hidden_ids:
            return "", complete
        new = self._stream.push(token, stops=self._tokens > self._min_tokens)
        return new, complete or self._stream.stopped_by is not None

    def finish(self) -> str:
        """What is left once no token follows."""
        return self._stream.finish() if self._stream is not None else ""
