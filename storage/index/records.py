"""What is noted of a prefix: its name, its source, how long it stays, how a question follows it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields

MOST_PRIORITY = 1000
MOST_LETTERS = 200
"""Of a name, a source, and the first words."""
MOST_AROUND = 2000
"""Letters of a template, before a question or after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRecord:
    """Beside the prefix it is about, in a file of its own: it outlives the index.

    Attributes:
      pinned: never evicted.
      retain_s: seconds after its last use when it expires: it is evicted before all that have not
        expired, and `prune_store(expired=True)` removes it. None: never.
      priority: what has less is evicted first, whatever its score; -1000 to 1000.
      name: what people call it; "" without one. Several prefixes may share a name.
      source: where its text is from, such as a file's name.
      begins: its first words.
      before, after: what a chat template puts between the prefix and a question, and between the
        question and its answer; both "" for a prefix that is bare text.
    """

    pinned: bool = False
    retain_s: float | None = None
    priority: int = 0
    name: str = ""
    source: str = ""
    begins: str = ""
    before: str = ""
    after: str = ""

    def __post_init__(self) -> None:
        seconds = self.retain_s
        if type(self.pinned) is not bool:
            raise ValueError(f"pinned: got {self.pinned!r}, expected a bool")
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (number and 0 <= seconds < math.inf):
            raise ValueError(f"retain_s: got {seconds!r}, expected None or seconds from 0 on")
        if type(self.priority) is not int or abs(self.priority) > MOST_PRIORITY:
            raise ValueError(
                f"priority: got {self.priority!r}, expected -{MOST_PRIORITY} to {MOST_PRIORITY}"
            )
        for what in ("name", "source", "begins"):
            text = getattr(self, what)
            if not isinstance(text, str) or len(text) > MOST_LETTERS or not text.isprintable():
                raise ValueError(
                    f"{what}: got {text!r}, expected one line of at most {MOST_LETTERS} letters"
                )
        for what in ("before", "after"):
            text = getattr(self, what)
            if not isinstance(text, str) or len(text) > MOST_AROUND:
                raise ValueError(
                    f"{what}: got {text!r}, expected a text of at most {MOST_AROUND} letters"
                )

    def encode(self) -> bytes | None:
        """The file's bytes; None for no record at all."""
        return None if self == PrefixRecord() else json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> PrefixRecord:
        """Inverse of `encode`; a file that says nothing is a pin: nothing is evicted by mistake."""
        try:
            found = json.loads(data)
            later = {f.name: found.get(f.name, "") for f in fields(cls) if f.type == "str"}
            return cls(**{f.name: found[f.name] for f in fields(cls) if f.type != "str"} | later)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls(pinned=True)


def first_words(text: str, letters: int = 60) -> str:
    """The beginning of a text in one line, cut between words where there are any."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text[: 4 * letters].split()))
    if len(line) <= letters:
        return line
    cut = line[:letters].rsplit(" ", 1)[0]
    return f"{cut} …"
