"""Grammars of generations, as masks over the vocabulary, by the library llguidance.

A grammar may crash the library (a chain of rules overflows its stack) or occupy it for hours (a
number that is a multiple of a large one). So a process compiles it first: this file as a program,
with (kind, text, tokens of the vocabulary) in JSON as its input, what is wrong or null as its
output. The program imports nothing of this package and starts in 0.1 s.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool

    from ckv_jax.model.tokenizer import Tokenizer

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
"""A JSON schema; a regular expression; a JSON list of texts; a grammar in GBNF or Lark; in Lark."""

_MOST_CHARACTERS = 64 * 1024
_DEEPEST = 32
_COMPILE_S = 5.0
_KEPT = 16


class Grammar:
    """A compiled grammar, for any number of generations. See `Engine.grammar`."""

    def __init__(self, matcher: Any, tokens: int) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def matcher(self) -> Matcher:
        """Follows one generation from its beginning."""
        return Matcher(self._matcher.deep_copy(), self._tokens)


class Matcher:
    """The state of one generation within its grammar."""

    def __init__(self, matcher: Any, tokens: int) -> None:
        import numpy as np  # here, as below: the program does without

        self._matcher = matcher
        self._words = np.zeros((1, -(-(tokens + 1) // 32)), np.int32)
        self._tokens = tokens

    def allowed(self, size: int, end_ids: Sequence[int]) -> Bool[np.ndarray, " V"]:
        """Returns a mask of the ids that may come next; `end_ids` where the generation may end."""
        import numpy as np
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._words)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little").astype(bool)
        mask = np.zeros(size, bool)
        known = min(size, self._tokens)
        mask[:known] = bits[:known]
        mask[[id_ for id_ in end_ids if id_ < size]] = bits[self._tokens]
        return mask

    @property
    def failed(self) -> bool:
        """Whether it became too complex to follow, so that nothing more may come."""
        return bool(self._matcher.is_error())

    def push(self, token: int) -> bool:
        """Takes in a token; whether the generation is complete and nothing may follow."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._latest: dict[tuple[GrammarKind, str], Grammar] = {}

    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        """Compiles a grammar of one kind.

        Raises `ValueError` for a grammar that is invalid, allows only the empty text, has more than
        64 Ki characters, is nested deeper than 32, or is not compiled within 5 s and 1 GiB.
        """
        if kind not in get_args(GrammarKind):
            raise ValueError(
                f"got kind={kind!r}, expected one of {', '.join(get_args(GrammarKind))}"
            )
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"expected at most {_MOST_CHARACTERS} characters")
        if (known := self._latest.get((kind, text))) is not None:
            return known
        if kind in ("json_schema", "choice"):
            _check_json(kind, text)
        tokenizer, size = self._vocabulary
        _try_out(kind, text, size)
        grammar = Grammar(_compiled(tokenizer, kind, text), size)
        if not grammar.matcher().allowed(size, ()).any():
            raise ValueError("expected a grammar that allows a text that is not empty")
        with self._lock:
            if len(self._latest) == _KEPT:
                del self._latest[next(iter(self._latest))]
            self._latest[kind, text] = grammar
        return grammar

    @cached_property
    def _vocabulary(self) -> tuple[Any, int]:
        """The tokenizer as llguidance takes it, and its number of tokens."""
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError(
                "the package llguidance is missing; for grammars, run: pip install llguidance"
            )
        tokens, encode = self._tokenizer.token_bytes(), self._tokenizer.encode
        vocabulary = _Vocabulary(
            tokens, self._tokenizer.control_ids, lambda text: encode(text).tolist()
        )
        return vocabulary.tokenizer(), len(tokens)


def _try_out(kind: GrammarKind, text: str, size: int) -> None:
    """Compiles a grammar where it can do no harm. Raises `ValueError`."""
    command = [sys.executable, "-P", __file__]
    try:
        done = subprocess.run(
            command, input=json.dumps((kind, text, size)), text=True, timeout=_COMPILE_S,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"it is not compiled within {_COMPILE_S:g} s; simplify it") from None
    if done.returncode or not done.stdout:
        raise ValueError("it is too complex")
    if (wrong := json.loads(done.stdout)) is not None:
        raise ValueError(wrong)


def _check_json(kind: str, text: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("expected JSON") from error
    if kind == "choice":
        texts = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
        if not value or not texts:
            raise ValueError("expected a list of texts, at least one")
    if _depth(value) > _DEEPEST:
        raise ValueError(f"expected values nested at most {_DEEPEST} deep")


def _depth(value: Any) -> int:
    """Returns the nesting depth of a JSON value."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth


# -- compiling -------------------------------------------------------------------------------------

_BETWEEN = r"[ \n\t]{0,16}"
"""White space between the parts of JSON: a model that may write any would do so for ever."""
_MOST_BYTES = 1 << 30
_STACK = 1 << 20
"""Bytes; other threads have at least twice as many."""


class _Vocabulary:
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
        import llguidance

        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))


def _compiled(tokenizer: Any, kind: str, text: str) -> Any:
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


def _main() -> None:
    """Compiles one grammar within bounds."""
    kind, text, size = json.load(sys.stdin)
    with suppress(ValueError, OSError):  # where the system has a lower limit, or none
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    tokens = [bytes([token]) if token < 256 else b"<%d>" % token for token in range(size)]
    tokenizer = _Vocabulary(tokens, [], lambda text: list(text.encode())).tokenizer()

    def run() -> None:
        wrong = None
        try:
            _compiled(tokenizer, kind, text)
        except ValueError as error:
            wrong = str(error)
        print(json.dumps(wrong))

    threading.stack_size(_STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
