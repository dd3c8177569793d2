"""Documents and the questions about them, as the model's chat template has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckv_jax.errors import CheckpointError
from ckv_jax.model.chat import ChatDocument, chat_document
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore

__all__ = ["Questions"]


class Questions:
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
        before = self._store.wish_of(prefix)
        wish = replace(before, before=document.before, after=document.after)
        if wish != before:
            self._store.set_wish(prefix.id, wish, salt=prefix.salt)

    def around(self, prefix: Prefix) -> tuple[str, str]:
        """The text before a question and the text after it; both "" after bare text."""
        wish = self._store.wish_of(prefix)
        return wish.before, wish.after

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
