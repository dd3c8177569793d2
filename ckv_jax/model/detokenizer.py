"""Detokenizer: token ids in, one at a time, and text out as soon as it is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

__all__ = ["LAST_TOKENS", "Detokenizer", "last_words"]

LAST_TOKENS = 16
"""Ids of a prompt that are enough for the spacing of what follows."""
_PATIENCE = 16  # ids that may wait for the end of a character; one has four bytes at most
_CHARACTER = 4  # ids that one character can take


class Detokenizer:
    """The text of a sequence of ids, piece by piece, over `tokenizers`' own `DecodeStream`.

    The first id follows those that came before, if any: SentencePiece's decoders take the space
    off the first word of a text, which the first word of an answer is not.

    Pieces joined equal decoding all ids at once, wherever what follows cannot change what came
    before (byte fallback turns a whole run of bytes to U+FFFD at its first wrong one; what has
    been given out by then stays). An id takes bounded time and only the latest ids are kept, also
    where they never become text.
    """

    def __init__(self, backend: Any, *, after: Sequence[int] = ()) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `after` are the ids before the first, or the last
        of them."""
        self._backend = backend
        self._context = last_words(backend, after)  # spacing depends on them
        self._stream = DecodeStream(ids=self._context)
        self._waiting: list[int] = []  # no text yet

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is now certain, "" inside a character."""
        self._waiting.append(token_id)
        try:
            piece: str | None = self._stream.step(self._backend, token_id)
        except Exception:  # a bare one: this id changed the text of those before it
            return self._cut(len(self._waiting))
        if piece is not None:
            self._context, self._waiting = self._waiting, []
            return piece
        return self._cut(self._seam()) if len(self._waiting) >= _PATIENCE else ""

    def finish(self) -> str:
        """No more ids: the text of those that wait, U+FFFD for part of a character."""
        text = self._after_context(self._waiting)
        self._context = self._waiting = []
        self._stream = DecodeStream()
        return text

    def _cut(self, at: int) -> str:
        """The text of the first `at` ids that wait; the others wait in a new stream."""
        first, rest = self._waiting[:at], self._waiting[at:]
        text = self._after_context(first)
        # A stream gives out again what ends inside a character: it begins without such ids.
        self._context, self._waiting = [] if text.endswith("\ufffd") else first, []
        self._stream = DecodeStream(ids=self._context)
        return text + "".join(map(self.push, rest))

    def _seam(self) -> int:
        """How many waiting ids can go without changing a character; all, if any would."""
        ids = self._waiting
        whole = self._decode(ids)
        for at in range(len(ids) - 1, len(ids) - _CHARACTER, -1):
            if self._decode(ids[:at]) + self._decode(ids[at:]) == whole:
                return at
        return len(ids)

    def _after_context(self, ids: list[int]) -> str:
        before, after = self._decode(self._context), self._decode(self._context + ids)
        return after[len(before) :] if after.startswith(before) else self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def last_words(backend: Any, ids: Sequence[int]) -> list[int]:
    """The fewest of the last ids that are text by themselves; none, if they end inside a
    character."""
    for count in range(1, min(len(ids), LAST_TOKENS) + 1):
        last = [int(one) for one in ids[-count:]]
        text: str = backend.decode(last, skip_special_tokens=False)
        if text and "\ufffd" not in text:
            return last
    return []
