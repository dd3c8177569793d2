"""Detokenizer: token ids in, one at a time, and text out as soon as it is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from ckv_jax.model.tokenizer import Tokenizer

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


class TextStream:
    """Turns one request's generated ids into text as they come.

    Pieces joined equal what all ids at once add to the text of the ids in `after`, the last of the
    prompt. Text is held back while it ends inside a character, or could be the start of a stop
    string; a stop string itself is never given out. Used by one thread.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), after: Sequence[int] = ()
    ) -> None:
        if any(not text for text in stop):
            raise ValueError("got an empty stop string, expected at least one character")
        self._detokenizer = tokenizer.detokenizer(after=after)
        self._stop = tuple(stop)
        self._held = ""
        self._text: list[str] = []
        self._stopped_by: str | None = None

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._text)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, once one has."""
        return self._stopped_by

    def push(self, token_id: int, *, stops: bool = True) -> str:
        """Add one id; returns the text that is now certain, often empty or one word.

        `stops`: whether stop strings count yet.
        """
        if self._stopped_by is not None:
            return ""
        new = self._detokenizer.push(token_id)
        return self._release(new, final=False) if stops else self._all(new)

    def finish(self) -> str:
        """No more ids: the text that was held back, an incomplete character included."""
        if self._stopped_by is not None:
            return ""
        return self._release(self._detokenizer.finish(), final=True)

    def _all(self, new: str) -> str:
        out, self._held = self._held + new, ""
        if out:
            self._text.append(out)
        return out

    def _release(self, new: str, *, final: bool) -> str:
        pending = self._held + new
        found = [(pending.find(stop), stop) for stop in self._stop if stop in pending]
        if found:
            end, self._stopped_by = min(found)
            out, self._held = pending[:end], ""
        else:
            keep = 0 if final else self._possible_stop(pending)
            out, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        if out:
            self._text.append(out)
        return out

    def _possible_stop(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        longest = min(len(pending), max((len(stop) for stop in self._stop), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(pending[-size:]) for stop in self._stop):
                return size
        return 0
