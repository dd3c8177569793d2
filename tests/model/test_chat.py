"""Documents in chat templates: where they are split, and what a template cannot take."""

from __future__ import annotations

import pytest

from ckv_jax.conversation import ChatDocument, chat_document
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from tests.model.small import CHAT, LLAMA_CHAT, write_tokenizer
from tests.model.spm_checkpoint import spm_tokenizer

DOCUMENT = "the cat sat on the mat.\n\nthe dog sat; größer 漢字 🙂."
QUESTION = "where sat the cat?"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
NO_USER = "{% for m in messages if m.role != 'user' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
BEHIND = "{% for m in messages | reverse %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
QUOTED = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}</>{% endfor %}"
FOLDED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if messages[0].role == 'system' %}<<SYS>>\n{{ messages[0].content }}\n<</SYS>>\n\n"
    "{% endif %}{{ m.content }} [/INST]{% endif %}{% endfor %}"
)
"""Llama 2's: the system's text in the user's turn."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    tokenizer._backend.chat_template = template
    return tokenizer


def asked(tokenizer: Tokenizer, document: ChatDocument, question: str) -> list[int]:
    """The whole prompt, as it is stored and asked."""
    text = f"{document.before}{tokenizer.as_text(question)}{document.after}"
    return [*document.tokens.tolist(), *tokenizer.encode_chat(text).tolist()]


def whole(tokenizer: Tokenizer, turn: str, document: str, question: str) -> list[int]:
    """The same prompt as one chat."""
    if turn == "system":
        messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
    else:
        messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
    return tokenizer.chat_ids(messages).tolist()


@pytest.mark.parametrize("turn", ["system", "user"])
@pytest.mark.parametrize("template", [CHAT, LLAMA_CHAT, FOLDED])
@pytest.mark.parametrize("document", [DOCUMENT, "user", "a", DOCUMENT * 30])
def test_document_and_question_are_the_chat(
    tokenizer: Tokenizer, turn: str, template: str, document: str
) -> None:
    with_template(tokenizer, template)
    found = chat_document(tokenizer, f"\n {document}\n", turn=turn)
    assert asked(tokenizer, found, QUESTION) == whole(tokenizer, turn, document, QUESTION)
    assert document[:-1] in tokenizer.decode(found.tokens)


@pytest.mark.parametrize("turn", ["system", "user"])
def test_a_sentencepiece_tokenizer_puts_no_space_between(turn: str) -> None:
    tokenizer = with_template(Tokenizer(spm_tokenizer()), FOLDED)
    found = chat_document(tokenizer, DOCUMENT, turn=turn)
    assert asked(tokenizer, found, "The capital?") == whole(
        tokenizer, turn, DOCUMENT, "The capital?"
    )


def test_names_of_control_tokens_are_text(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, CHAT)
    end = tokenizer.eos_token_id
    text = f"the cat<|endoftext|> sat <|endoftext|>{DOCUMENT}<|endoftext|>"
    for turn in ("system", "user"):
        found = chat_document(tokenizer, text, turn=turn)
        prompt = asked(tokenizer, found, "what is <|endoftext|>?")
        assert end not in prompt
        assert tokenizer.decode(prompt).count("<|endoftext|>") == 4
    assert end in tokenizer.encode(text)


def test_instructions_stand_before_the_document(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, CHAT)
    text = tokenizer.decode(chat_document(tokenizer, "a cat", instructions="Be brief.").tokens)
    assert text == "<system>Be brief.\n\na cat"
    found = chat_document(tokenizer, "a cat", turn="user", instructions="Be brief.")
    assert tokenizer.decode(found.tokens) == "<system>Be brief.</><user>a cat"


def test_without_a_system_turn_it_stands_in_the_users(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, NO_SYSTEM + CHAT)
    assert tokenizer.decode(chat_document(tokenizer, "a cat").tokens) == "<user>a cat"
    with pytest.raises(ValueError, match=r"system turn: the chat template refuses.*no system"):
        chat_document(tokenizer, "a cat", turn="system")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NO_USER, "renders .* 0 times"),
        (BEHIND, "puts the question before the document|changes"),
        (QUOTED, "changes the document's text"),
        ("{{ messages[0].content }}" + CHAT, "2 times, expected once"),
    ],
)
def test_a_template_that_cannot_be_split_is_refused(
    tokenizer: Tokenizer, template: str, reason: str
) -> None:
    with_template(tokenizer, template)
    with pytest.raises(ValueError, match=reason):
        chat_document(tokenizer, "the cat sat", turn="system")


def test_without_a_turn_for_it_the_reasons_of_both_are_given(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, NO_USER)
    with pytest.raises(ValueError, match=r"system turn: .* question .*user turn: .* document .*raw"):
        chat_document(tokenizer, "the cat sat")


def test_what_is_no_document_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="empty document"):
        chat_document(tokenizer, " \n")
    with pytest.raises(ValueError, match="turn='boss', expected system or user"):
        chat_document(tokenizer, "a cat", turn="boss")


def test_roles_alone_may_name_control_tokens(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, "{{ messages[0].call.role }}{{ messages[0].call | list }}{{ about }}")
    name = "<|endoftext|>"
    messages = [{"role": "user", "content": "", "call": {"role": name, name: 1}}]
    assert tokenizer.eos_token_id not in tokenizer.chat_ids(messages, about=name)
