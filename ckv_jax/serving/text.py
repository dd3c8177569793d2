"""From the tokens of one generation to its text, and to the token that ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
        self._end_ids = {*end_ids, *params.stop_token_ids}

    @property
    def text(self) -> str:
        """Everything so far, without stop tokens and stop strings."""
        return self._stream.text if self._stream is not None else ""

    def ends(self, token: int) -> bool:
        """Whether a token ends the text and is no part of it."""
        return token in self._end_ids

    def push(self, token: int) -> tuple[str, bool]:
        """(what of the text is certain now and was not before, whether the text ends here)."""
        if self.ends(token):
            return "", True
        if self._stream is None:
            return "", False
        return self._stream.push(token), self._stream.stopped_by is not None

    def finish(self) -> str:
        """What is left once no token follows."""
        return self._stream.finish() if self._stream is not None else ""
