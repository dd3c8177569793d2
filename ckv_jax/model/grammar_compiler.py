"""Grammars as llguidance compiles them, and a process that does so first: as `python FILE`, with
(kind, text, tokens of the vocabulary) in JSON as its input, what is wrong or null as its output.

A grammar may crash the library (a chain of rules overflows its stack) or occupy it for hours (a
number that is a multiple of a large one). It imports nothing of this package: it starts in 0.1 s.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_BETWEEN = r"[ \n\t]{0,16}"
"""White space between the parts of JSON: a model that may write any would do so for ever."""
_MOST_BYTES = 1 << 30
_STACK = 1 << 20
"""Bytes; other threads have at least twice as many."""


class Vocabulary:
    """A tokenizer as llguidance takes it, with an id past the others that ends a generation."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        control_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<end>"]
        self.special_token_ids = [*control_ids, len(tokens)]
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))

    def tokenizer(self) -> Any:
        """What `compiled` takes."""
        import llguidance

        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))


def compiled(tokenizer: Any, kind: str, text: str) -> Any:
    """A matcher of llguidance. Raises `ValueError` for a grammar that is wrong."""
    import llguidance

    if kind == "json_schema":
        made = llguidance.LLMatcher.grammar_from_json_schema
        grammar = made(text, overrides={"whitespace_pattern": _BETWEEN})
    else:
        grammar = llguidance.grammar_from(kind, text)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error().splitlines()[0][:300])
    return matcher


def main() -> None:
    """Compiles one grammar within bounds."""
    kind, text, size = json.load(sys.stdin)
    with suppress(ValueError, OSError):  # where the system has a lower limit, or none
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    tokens = [bytes([token]) if token < 256 else b"<%d>" % token for token in range(size)]
    tokenizer = Vocabulary(tokens, [], lambda text: list(text.encode())).tokenizer()

    def run() -> None:
        wrong = None
        try:
            compiled(tokenizer, kind, text)
        except ValueError as error:
            wrong = str(error)
        print(json.dumps(wrong))

    threading.stack_size(_STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
