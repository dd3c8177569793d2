"""A document in a chat template: what is stored, and how a question continues it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from ckv_jax.model.tokenizer import Tokenizer

__all__ = ["TURNS", "ChatDocument", "chat_document"]

TURNS = ("system", "user")
"""The turns that a document may stand in."""

# Not characters, so that no text holds them.
_END, _QUESTION = "\ufdd3\ufdd4", "\ufdd5\ufdd6"


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
        document: text; white space at its ends is dropped.
        turn: the turn that it stands in; None: the system turn, or the user's where the template
            takes no document in a system turn.
        instructions: text of the system turn, before a document that stands there.

    Raises:
        ValueError: the document is empty, or the template does not render it as it is, with the
            question behind it.
        CheckpointError: there is no template.
    """
    document, instructions = document.strip(), instructions.strip()
    if not document:
        raise ValueError("got an empty document, expected text")
    if turn not in (None, *TURNS):
        raise ValueError(f"got turn={turn!r}, expected {' or '.join(TURNS)}")
    if turn is not None:
        return _split(tokenizer, document, turn, instructions)
    try:
        return _split(tokenizer, document, "system", instructions)
    except ValueError:
        return _split(tokenizer, document, "user", instructions)


def _split(tokenizer: Tokenizer, document: str, turn: str, instructions: str) -> ChatDocument:
    where = f"the chat template takes no document in the {turn} turn"
    document, instructions = tokenizer.as_text(document), tokenizer.as_text(instructions)
    try:
        text = tokenizer.apply_chat(_messages(f"{document}{_END}", turn, instructions))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    for mark, what in ((_END, "the document"), (_QUESTION, "a question behind it")):
        if (found := text.count(mark)) != 1:
            raise ValueError(f"{where}: it renders {what} {found} times, expected once")
    head, _, rest = text.partition(_END)
    if _QUESTION in head:
        raise ValueError(f"{where}: it puts the question before the document")
    if not head.endswith(document):
        raise ValueError(f"{where}: it changes the document's text")
    before, _, after = rest.partition(_QUESTION)
    alone = tokenizer.encode_chat(head, begins=True)
    size = _same(alone, tokenizer.encode_chat(f"{head}{before}What?{after}", begins=True))
    # A token may cross the end of the document, as ".\n\n" does: such tokens are not stored.
    while "\ufffd" in (crossing := tokenizer.decode(alone[size:])) and size:
        size -= 1
    return ChatDocument(tokens=alone[:size], before=crossing + before, after=after)


def _messages(document: str, turn: str, instructions: str) -> list[dict[str, str]]:
    if turn == "system":
        text = f"{instructions}\n\n{document}" if instructions else document
        return [{"role": "system", "content": text}, {"role": "user", "content": _QUESTION}]
    first = [{"role": "system", "content": instructions}] if instructions else []
    return [*first, {"role": "user", "content": f"{document}\n\n{_QUESTION}"}]


def _same(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the longest common prefix."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
