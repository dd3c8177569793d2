"""Documents and questions in a chat template: renders a document for ingest, and the question
that continues it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from jaxtyping import Int

from ckv_jax.answer import room
from ckv_jax.errors import Cancelled, CheckpointError, CkvError, ContextOverflow
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.request import Generation, Request
from ckv_jax.storage.chain import common_length
from ckv_jax.storage.prefix import Prefix

if TYPE_CHECKING:
    from ckv_jax.engine import Engine
    from ckv_jax.ingest import Progress
    from ckv_jax.serving.placement import Placement

TURNS = ("system", "user")
"""The turns that a document may stand in."""

# Not characters, so that no text holds them.
_END, _QUESTION = "\ufdd3\ufdd4", "\ufdd5\ufdd6"
_RAW = "got turn or instructions with raw text, expected neither"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDocument:
    """A document as a chat template renders it, up to its end."""

    tokens: Int[np.ndarray, " n"]
    """int32: the template's beginning and the document."""
    before: str
    """The text between `tokens` and a question."""
    after: str
    """The text between a question and its answer."""


def chat_document(
    tokenizer: Tokenizer, document: str, *, turn: str | None = None, instructions: str = ""
) -> ChatDocument:
    """Renders the chat template with marks, and splits it at the end of the document.

    Args:
        tokenizer: has a chat template.
        document: text; white space at its end is dropped. A chat over the document with such an end
            has these tokens, too.
        turn: the turn that it stands in; None: the system turn, or the user's where the template
            takes no document in a system turn.
        instructions: text of the system turn, before a document that stands there.

    Raises:
        ValueError: the document is empty, or the template does not render it as it is, with the
            question behind it.
        CheckpointError: there is no template.
    """
    document, instructions = document.rstrip(), instructions.strip()
    if not document:
        raise ValueError("got an empty document, expected a text")
    if turn not in (None, *TURNS):
        raise ValueError(f"got turn={turn!r}, expected {' or '.join(TURNS)}")
    if turn is not None:
        return _split(tokenizer, document, turn, instructions)
    try:
        return _split(tokenizer, document, "system", instructions)
    except ValueError as why:
        try:
            return _split(tokenizer, document, "user", instructions)
        except ValueError as error:
            raise ValueError(f"{why}; {error}; to store plain text, use raw (--raw)") from None


def document_tokens(
    tokenizer: Tokenizer,
    model: ModelConfig,
    text: str,
    *,
    raw: bool = False,
    turn: str | None = None,
    instructions: str = "",
) -> tuple[Int[np.ndarray, " n"], ChatDocument | None]:
    """What of a document is stored: int32 [n], and how the chat template has it.

    With `raw`, and without a template, that is the bare text; then None. Raises `CheckpointError`
    for a turn or instructions without a template, `ContextOverflow`, and as `chat_document`.
    """
    placed = None
    if not raw and tokenizer.chat_template:
        placed = chat_document(tokenizer, text, turn=turn, instructions=instructions)
    elif turn is not None or instructions:
        if raw:
            raise ValueError(_RAW)
        _require_template(tokenizer)
    tokens = tokenizer.encode(text, begins=True) if placed is None else placed.tokens
    check_length(tokens, model)
    return tokens, placed


def check_length(tokens: np.ndarray, model: ModelConfig) -> None:
    """Raises `ValueError` where there are no tokens int [n], `ContextOverflow` for too many."""
    if not len(tokens):
        raise ValueError("got an empty text, expected at least one token")
    if len(tokens) > (limit := model.max_position_embeddings):
        raise ContextOverflow(
            f"got a text of {len(tokens)} tokens, expected at most {limit}, the model's context; "
            "shorten the text, or use a model with a longer context"
        )


def check_talk(tokenizer: Tokenizer, model: ModelConfig, document: str) -> None:
    """Refuses what a `Conversation` cannot be about."""
    _require_template(tokenizer)
    document_tokens(tokenizer, model, document)


def _require_template(tokenizer: Tokenizer | None) -> None:
    if tokenizer is None or not tokenizer.chat_template:
        raise CheckpointError("the tokenizer has no chat template; use a chat model")


def _split(tokenizer: Tokenizer, document: str, turn: str, instructions: str) -> ChatDocument:
    where = f"the chat template supports no document in the {turn} turn"
    document, instructions = tokenizer.as_text(document), tokenizer.as_text(instructions)
    try:
        text = tokenizer.apply_chat(_messages(f"{document}{_END}", turn, instructions))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    for mark, what in ((_END, "the document"), (_QUESTION, "a question after it")):
        if (found := text.count(mark)) != 1:
            raise ValueError(f"{where}: it renders {what} {found} times, expected once")
    head, _, rest = text.partition(_END)
    if _QUESTION in head:
        raise ValueError(f"{where}: it puts the question before the document")
    if not head.endswith(document.lstrip()):  # some templates trim what stands in a turn
        raise ValueError(f"{where}: it changes the document's text")
    before, _, after = rest.partition(_QUESTION)
    alone = tokenizer.encode_chat(head, begins=True)
    # A token may cross the end of the document, as ".\n\n" does: such tokens are not stored, also
    # if only a document that ends with a new line has them.
    ends = (f"{head}{before}What?{after}", f"{head}\n")
    size = min(common_length(alone, tokenizer.encode_chat(end, begins=True)) for end in ends)
    while "\ufffd" in (crossing := tokenizer.decode(alone[size:])) and size:
        size -= 1
    return ChatDocument(tokens=alone[:size], before=crossing + before, after=after)


def _messages(document: str, turn: str, instructions: str) -> list[dict[str, str]]:
    if turn == "system":
        text = f"{instructions}\n\n{document}" if instructions else document
        return [{"role": "system", "content": text}, {"role": "user", "content": _QUESTION}]
    first = [{"role": "system", "content": instructions}] if instructions else []
    return [*first, {"role": "user", "content": f"{document}\n\n{_QUESTION}"}]


class Conversation:
    """Questions about one document, in turn. Used by one thread; a context manager.

    The document is the prefix that `Engine.ingest` makes of it. Each turn is stored behind its
    answer, so that the next one computes its own tokens only.
    """

    def __init__(self, engine: Engine, document: str, *, progress: Progress | None = None) -> None:
        """Stores the document. Raises `CheckpointError` without a chat template."""
        _require_template(engine.tokenizer)
        self.budget: float | str | None = None
        """Of the questions to come, see `Request.budget`; None: the engine's."""
        self.prefix: Prefix = engine.ingest(document, progress=progress)
        """The stored document."""
        self.latest: Generation | None = None
        """The latest answer, if it was not given up before its first token."""
        self._engine = engine
        self._document = document.rstrip()
        self._messages: list[dict[str, str]] = []
        self._storing = ThreadPoolExecutor(1, "ckv-turns")
        self._stored: Future[Prefix] | None = None

    def ask(self, question: str, *, max_tokens: int | None = None) -> Generator[str, None, None]:
        """The pieces of the answer as they come; afterwards it is part of the conversation, also
        what there is of one that is closed.

        `max_tokens`: None: 256, or what the context has room for. Raises what is wrong with the
        request; the question is then no part of the conversation.
        """
        self.wait()
        asked = {"role": "user", "content": question.strip()}
        tokens = self._tokens([*self._messages, asked]).tolist()
        limit = self._engine.model_config.max_position_embeddings
        most = room(len(tokens) - 1, 1, limit)
        request = Request(prefix=tokens[:-1], suffix=tokens[-1:], budget=self.budget)
        sampling = SamplingParams(max_tokens=min(most, max_tokens or most))
        stream = self._engine.generate(request, sampling, keep_kv=True)
        try:
            for event in stream:
                if event.text:
                    yield event.text
        finally:
            stream.cancel()
            (generation,) = stream.results()
            if generation.error is None:
                said = {"role": "assistant", "content": generation.text.strip()}
                self._messages += [asked, said]
                self.latest = generation
                if generation.completion().kv is not None:
                    self._stored = self._storing.submit(self._engine.append, generation)
        if not isinstance(generation.error, Cancelled):
            generation.raise_for_error()

    def forget(self) -> None:
        """Begins another conversation about the same document."""
        self.wait()
        self._messages, self.latest = [], None

    def wait(self) -> None:
        """Returns once the latest turn is stored, or could not be: the next one then computes it
        again."""
        stored, self._stored = self._stored, None
        if stored is not None:
            with suppress(CkvError):
                stored.result()

    def _tokens(self, messages: list[dict[str, str]]) -> np.ndarray:
        """int32 [n]: the document and these messages, where the document stands in the template."""
        first, *rest = messages
        for whole in (
            [{"role": "system", "content": self._document}, *messages],
            [{"role": "user", "content": f"{self._document}\n\n{first['content']}"}, *rest],
        ):
            try:
                tokens = self._engine.chat(whole)
            except ValueError:
                continue
            if tokens[: self.prefix.num_tokens].tolist() == self.prefix.tokens.tolist():
                return tokens
        raise ValueError("the chat template moves the document in a conversation of several turns")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._storing.shutdown()


class ChatPrompts:
    """Renders documents, and questions after stored ones. Thread-safe.

    How a question continues a prefix is noted in the store, with the prefix's name.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tokenizer = placement.tokenizer
        self._store = placement.store

    def document(
        self,
        document: str | Sequence[int] | np.ndarray,
        *,
        raw: bool,
        turn: str | None,
        instructions: str,
    ) -> tuple[np.ndarray, ChatDocument | None]:
        """As `document_tokens`; token ids are stored unchanged."""
        placement = self._placement
        if isinstance(document, str) and placement.tokenizer is not None:
            return document_tokens(
                placement.tokenizer, placement.model, document,
                raw=raw, turn=turn, instructions=instructions,
            )  # fmt: skip
        if turn is not None or instructions:
            raise ValueError(_RAW)
        tokens = placement.encode(document, begins=True)
        check_length(tokens, placement.model)
        return tokens, None

    def note(self, prefix: Prefix, document: ChatDocument) -> None:
        """Notes how a question continues a document that was stored as `prefix`."""
        before = self._store.record_of(prefix)
        record = replace(before, before=document.before, after=document.after)
        if record != before:
            self._store.set_record(prefix.id, record, salt=prefix.salt)

    def around(self, prefix: Prefix) -> tuple[str, str]:
        """The text before a question and the text after it; both "" after bare text."""
        record = self._store.record_of(prefix)
        return record.before, record.after

    def tokens(self, prefix: Prefix, question: str) -> np.ndarray:
        """int32 [n]: what follows a prefix when a question is asked, up to its answer."""
        tokenizer = self._of_text()
        if not question.strip():
            raise ValueError("got an empty question, expected text")
        before, after = self.around(prefix)
        if not (before or after):
            return tokenizer.encode(question)
        return tokenizer.encode_chat(f"{before}{tokenizer.as_text(question.strip())}{after}")

    def chat(self, messages: str | Sequence[dict[str, Any]], **values: Any) -> np.ndarray:
        """int32 [n]: messages in the chat template, see `Tokenizer.apply_chat`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._of_text().chat_ids(messages, **values)

    def _of_text(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("got text, expected token ids: this engine has no tokenizer")
        return self._tokenizer
