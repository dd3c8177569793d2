"""Grammars: what a generation may be, as masks over the vocabulary, by the library llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool

from ckv_jax.errors import EngineClosed
from ckv_jax.model.tokenizer import Tokenizer

__all__ = ["Grammar", "GrammarKind", "Grammars", "Matcher"]

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
"""A JSON schema; a regular expression; a JSON list of texts; a grammar in GBNF or Lark; in Lark."""

_MOST_CHARACTERS = 64 * 1024
_DEEPEST = 32
_COMPILE_S = 5.0
_BETWEEN = r"[ \n\t]{0,16}"
"""White space between the parts of JSON: a model that may write any would do so for ever."""


class Grammar:
    """A compiled grammar, for any number of generations. See `Engine.grammar`."""

    def __init__(self, matcher: Any, tokens: int) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def matcher(self) -> Matcher:
        """Follows one generation from its beginning."""
        return Matcher(self._matcher.deep_copy(), self._tokens)


class Matcher:
    """Where in its grammar one generation is."""

    def __init__(self, matcher: Any, tokens: int) -> None:
        self._matcher = matcher
        self._words = np.zeros((1, -(-(tokens + 1) // 32)), np.int32)
        self._tokens = tokens

    def allowed(self, size: int, end_ids: Sequence[int]) -> Bool[np.ndarray, " V"]:
        """Which of `size` ids may come next; `end_ids` where the generation may end."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._words)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little").astype(bool)
        mask = np.zeros(size, bool)
        known = min(size, self._tokens)
        mask[:known] = bits[:known]
        mask[[id_ for id_ in end_ids if id_ < size]] = bits[self._tokens]
        return mask

    def push(self, token: int) -> bool:
        """Takes in a token; whether the generation is complete and nothing may follow."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe; compiling takes milliseconds to seconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiling = ThreadPoolExecutor(1, "ckv-grammars")
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        """A grammar of one kind. Raises `ValueError` for one that is wrong, larger than 64 Ki
        characters, nested deeper than 32, or too complex, `EngineClosed` after `close`."""
        if kind not in get_args(GrammarKind):
            raise ValueError(
                f"got kind={kind!r}, expected one of {', '.join(get_args(GrammarKind))}"
            )
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"expected at most {_MOST_CHARACTERS} characters")
        if kind in ("json_schema", "choice"):
            _check_json(kind, text)
        try:
            future = self._compiling.submit(self._compile, kind, text)
        except RuntimeError as error:  # as the thread says once it has ended
            raise EngineClosed("the engine is closed") from error
        try:
            return future.result(_COMPILE_S)
        except TimeoutError:
            future.cancel()
            raise ValueError(f"it is not compiled within {_COMPILE_S:g} s") from None

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def _compile(self, kind: GrammarKind, text: str) -> Grammar:
        try:
            import llguidance
        except ImportError as error:
            raise ValueError("grammars need one more package: pip install llguidance") from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        if kind == "json_schema":
            made = llguidance.LLMatcher.grammar_from_json_schema
            compiled = made(text, overrides={"whitespace_pattern": _BETWEEN})
        else:
            compiled = llguidance.grammar_from(kind, text)
        vocabulary, size = self._for(llguidance)
        matcher = llguidance.LLMatcher(vocabulary, compiled, limits=limits, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0][:300])
        return Grammar(matcher, size)

    def _for(self, llguidance: Any) -> tuple[Any, int]:
        with self._lock:
            tokens = self._tokenizer.token_bytes()
            if self._vocabulary is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, tokens))
                self._vocabulary = llguidance.LLTokenizer(wrapper), len(tokens)
            found: tuple[Any, int] = self._vocabulary
            return found


class _Vocabulary:
    """A tokenizer as llguidance takes it, with an id past the others that ends a generation."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<end>"]
        self.special_token_ids = [*tokenizer.control_ids, len(tokens)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids


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
    """How deep a JSON value is nested."""
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
