"""Documents and the questions about them, as the model's chat template has them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ckv_jax.answer import room
from ckv_jax.errors import Cancelled, CheckpointError, CkvError
from ckv_jax.model.chat import ChatDocument, chat_document
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.request import Generation, Request
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore

if TYPE_CHECKING:
    from ckv_jax.engine import Engine
    from ckv_jax.ingest import Progress

__all__ = ["ChatPrompts", "Conversation"]


class Conversation:
    """Questions about one document, in turn. Used by one thread; a context manager.

    The document is the prefix that `Engine.ingest` makes of it. Each turn is stored behind its
    answer, so that the next one computes its own tokens only.
    """

    def __init__(self, engine: Engine, document: str, *, progress: Progress | None = None) -> None:
        """Stores the document. Raises `CheckpointError` without a chat template."""
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise CheckpointError("the tokenizer has no chat template")
        self.budget: float | str | None = None
        """Of the questions to come, see `Request.budget`; None: the engine's."""
        self.prefix: Prefix = engine.ingest(document, progress=progress)
        """The stored document."""
        self.latest: Generation | None = None
        """The latest answer, if it was not given up before its first token."""
        self._engine = engine
        self._document = document.strip()
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

    def __init__(self, tokenizer: Tokenizer | None, store: ChunkStore) -> None:
        self._tokenizer = tokenizer
        self._store = store

    def document(
        self, text: str, *, turn: str | None = None, instructions: str = ""
    ) -> ChatDocument | None:
        """A document in the chat template, see `chat_document`; None: there is no template.

        Raises `CheckpointError` for a turn or instructions without a template.
        """
        if self._tokenizer is not None and self._tokenizer.has_chat_template:
            return chat_document(self._tokenizer, text, turn=turn, instructions=instructions)
        if turn is not None or instructions:
            raise CheckpointError("the tokenizer has no chat template")
        return None

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
