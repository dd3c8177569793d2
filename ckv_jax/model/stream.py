"""TextStream: token ids in, finished text out, ending at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ckv_jax.model.tokenizer import Tokenizer

__all__ = ["TextStream"]


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
