"""Which requests go to the same replica."""

from __future__ import annotations

import json

import pytest

from ckv_jax.server.bodies import prefix_key


def key(**body: object) -> str:
    return prefix_key(json.dumps(body).encode())


def chat(*texts: object) -> list[dict]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_chats_with_one_prefix_go_together() -> None:
    manual = "The manual."
    first = key(messages=chat(manual, "What is it for?"))
    assert first == key(messages=chat(manual, "Who may use it?", "All.", "Why?"), stream=True)
    assert first == key(messages=chat([{"type": "text", "text": manual}], "What is it for?"))
    assert first == key(messages=chat(manual), pinned=True)  # as it is put to be stored
    assert first != key(messages=chat("Another manual.", "What is it for?"))


def test_plain_prompts_and_what_is_stored_for_them_go_together() -> None:
    long = "The keeper walks up the stairs. " * 200
    assert key(text=long) == key(prompt=f"{long} And then?") == key(prompt=[long])
    assert key(prompt="up") != key(prompt="down")
    tokens = list(range(5000))
    assert key(tokens=tokens) == key(prompt=[*tokens, 7]) == key(prompt=[tokens])
    assert key(tokens=tokens) != key(tokens=tokens[1:])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b'"text"', b'{"messages": [7]}', b'{"prompt": {}}', b"[" * 9999,
     b'{"previous_response_id": "\\ud800"}'],
)  # fmt: skip
def test_a_wrong_body_has_a_key(body: bytes) -> None:
    assert len(prefix_key(body)) == 64


def test_a_document_goes_with_the_chat_that_begins_with_it() -> None:
    assert key(document="The manual.") == key(messages=chat("The manual.", "What is it for?"))


def test_a_response_goes_on_where_it_began() -> None:
    first = key(input="What is it for?", previous_response_id=None)
    assert first == key(input="What is it for?") != key(input="Why?")
    assert first == key(input="Why?", previous_response_id=f"resp-12-{first}")
