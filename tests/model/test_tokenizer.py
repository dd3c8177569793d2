"""Text to ids and back, and text as it streams."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ckv_jax.conversation import ChatDocument, chat_document
from ckv_jax.errors import CheckpointError
from ckv_jax.model.tokenizer import TextStream, Tokenizer, load_tokenizer, tokenizer_files
from tests.model.small import CHAT, LLAMA_CHAT, write_tokenizer
from tests.model.spm_checkpoint import spm_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in ("the cat sat", "", "  two  spaces , and . dots", "größer 漢字 🙂\n\tend"):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.ndim == 1
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("the cat")) < len("the cat")


def test_special_tokens_are_text_only_when_asked(tokenizer: Tokenizer) -> None:
    end = tokenizer.id_of("<|endoftext|>")
    ids = [*tokenizer.encode("the cat"), end]
    assert tokenizer.decode(ids) == "the cat<|endoftext|>"
    assert tokenizer.decode(ids, skip_special=True) == "the cat"


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat(messages) == "<user>hello</><assistant>"
    assert tokenizer.apply_chat(messages, add_generation_prompt=False) == "<user>hello</>"
    with pytest.raises(ValueError, match="no boss"):
        tokenizer.apply_chat([{"role": "boss", "content": "hello"}])
    with pytest.raises(ValueError, match="no messages"):
        tokenizer.apply_chat([])
    with pytest.raises(ValueError, match="role and content"):
        tokenizer.apply_chat([{"role": "user"}])
    for wrong in (5, [5], [None], [{5: 1, "a": 2}]):
        with pytest.raises(ValueError, match=r"messages=5|a message"):
            tokenizer.apply_chat(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("begin", [None, "<|begin_of_text|>"])
def test_chat_templates_are_those_of_transformers(begin: str | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, begin=begin)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": " sit on the mat "},
        {"role": "user", "content": "the dog? größer 🙂"},
    ]
    for prompt in (True, False):
        text = ours.apply_chat(messages, add_generation_prompt=prompt)
        ways = {"add_generation_prompt": prompt}
        assert text == theirs.apply_chat_template(messages, tokenize=False, **ways)
        ids = theirs.apply_chat_template(messages, return_dict=False, **ways)
        np.testing.assert_array_equal(ours.encode(text, begins=True), ids)


def test_the_begin_of_text_stands_once_and_only_at_the_beginning(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, begin="<s>")
    llama = load_tokenizer(tmp_path)
    begin = llama.encode("<s>the cat", begins=True)[0]
    plain = llama.encode("the cat")
    assert begin not in plain
    for text in ("the cat", "<s>the cat"):
        np.testing.assert_array_equal(llama.encode(text, begins=True), [begin, *plain])
        np.testing.assert_array_equal(llama.encode(text), plain)
    assert len(llama.encode("", begins=True)) == 0


def test_pieces_with_spaces_inside_stream_as_they_decode(tmp_path: Path) -> None:
    """In the manner of Llama 2 and Mistral: ▁ for spaces, bytes for what has no piece."""
    letters = ["▁", *"abcdehnostu", "▁the", "th", "▁c", "at"]
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)}
    vocabulary |= {piece: 256 + i for i, piece in enumerate(letters)} | {"<s>": 300}
    merges = [("t", "h"), ("a", "t"), ("▁", "c")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 300)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path)
    mistral = load_tokenizer(tmp_path)
    for text in ("the cat on the  coast", "é 漢字 🙂 the"):
        ids = mistral.encode(text)
        stream = TextStream(mistral)
        assert "".join([*map(stream.push, map(int, ids)), stream.finish()]) == text
        assert mistral.decode(ids) == text
        assert mistral.encode(text, begins=True).tolist() == [300, *ids]


@pytest.mark.parametrize("prompt", ["The capital of France", "é", "the 🙂", "The capital of "])
def test_the_first_word_of_a_generation_keeps_its_space(prompt: str) -> None:
    """A SentencePiece decoder takes one space off a text, which a generation does not begin."""
    spm = Tokenizer(spm_tokenizer())
    before = spm.encode(prompt, begins=True).tolist()
    following = [one for one in spm.encode("is the quick 🙂 brown").tolist() if one != 1]
    whole, known = spm.decode([*before, *following]), spm.decode(before)
    stream = TextStream(spm, after=before)
    pieces = [*map(stream.push, following), stream.finish()]
    assert known + "".join(pieces) == whole
    assert stream.text.startswith(" is")
    assert spm.decode_next(following[0], after=before) == " is"
    stop = TextStream(spm, stop=[" the"], after=before)
    assert "".join(map(stop.push, following)) == " is"
    at_once = TextStream(spm, stop=[" is"], after=before)
    assert ("".join(map(at_once.push, following)), at_once.stopped_by) == ("", " is")


def test_missing_and_broken_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="hf download Qwen/Qwen3-8B --local-dir Qwen3-8B"):
        load_tokenizer("Qwen/Qwen3-8B")
    for local in ("models/Qwen3-8B", "checkpoints/Qwen3-8B"):
        with pytest.raises(CheckpointError, match=f"{local}; give the path of a downloaded model"):
            load_tokenizer(local)
    with pytest.raises(CheckpointError, match="tokenizer missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_vocabulary_and_merges_are_enough(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    whole = load_tokenizer(tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    parts = load_tokenizer(tmp_path)
    assert tmp_path / "vocab.json" in tokenizer_files(tmp_path)
    for text in ("the cat sat on the mat", "größer"):
        np.testing.assert_array_equal(parts.encode(text), whole.encode(text))
        assert parts.decode(parts.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_streamed_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(int(token)) for token in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="abc ", max_size=30),
    stop=st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_at_the_first_stop_string(
    tokenizer: Tokenizer, text: str, stop: list[str]
) -> None:
    stream = TextStream(tokenizer, stop=stop)
    given_out = ""
    for token in tokenizer.encode(text):
        given_out += stream.push(int(token))
        assert not any(one in given_out for one in stop)
    given_out += stream.finish()
    ends = [text.find(one) for one in stop if one in text]
    if not ends:
        assert given_out == text
        assert stream.stopped_by is None
    else:
        assert stream.stopped_by in stop
        assert given_out == text[: text.find(stream.stopped_by)]
        assert not any(one in given_out for one in stop)


def test_incomplete_characters_are_held_back(tokenizer: Tokenizer) -> None:
    ids = [int(token) for token in tokenizer.encode("a🙂")]
    assert len(ids) > 3  # the emoji is several byte tokens
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert pieces[0] == "a"
    assert set(pieces[1:-1]) == {""}
    assert pieces[-1] == "🙂"
    cut = TextStream(tokenizer)
    for token in ids[:-1]:
        cut.push(token)
    assert cut.finish() == "\ufffd"
    assert cut.text == tokenizer.decode(ids[:-1])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_join_to_their_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    known = st.integers(0, len(tokenizer._backend) + 3)  # the last ones have no text
    high = st.sampled_from([i for i in range(300) if tokenizer.decode([i]) == "\ufffd"])
    runs = st.lists(st.one_of(known, st.lists(high, max_size=40)), max_size=8)
    ids = [i for run in data.draw(runs) for i in (run if isinstance(run, list) else [run])]
    stream = TextStream(tokenizer)
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


# -- documents in chat templates -------------------------------------------------------------------


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
    """White space before it is that of the chat; at its end there is none."""
    with_template(tokenizer, template)
    found = chat_document(tokenizer, f"\n {document}\n", turn=turn)
    assert asked(tokenizer, found, QUESTION) == whole(tokenizer, turn, f"\n {document}", QUESTION)
    assert document[:-1] in tokenizer.decode(found.tokens)


@pytest.mark.parametrize("turn", ["system", "user"])
def test_a_chat_has_the_stored_tokens_whatever_white_space_ends_its_document(turn: str) -> None:
    """A full stop and a new line are one token here, as they are for Qwen2.5."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=257, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator([".\n"] * 4, trainer)
    tokenizer = with_template(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)), CHAT)
    stored = chat_document(tokenizer, "the cat.", turn=turn).tokens.tolist()
    assert tokenizer.decode(stored).endswith("the cat")
    for end in ("", "\n", " \n\n"):
        assert whole(tokenizer, turn, f"the cat.{end}", QUESTION)[: len(stored)] == stored


@pytest.mark.parametrize("turn", ["system", "user"])
def test_a_sentencepiece_tokenizer_puts_no_space_between(turn: str) -> None:
    tokenizer = with_template(Tokenizer(spm_tokenizer()), FOLDED)
    found = chat_document(tokenizer, DOCUMENT, turn=turn)
    assert asked(tokenizer, found, "The capital?") == whole(
        tokenizer, turn, DOCUMENT, "The capital?"
    )


def test_names_of_control_tokens_are_text(tokenizer: Tokenizer) -> None:
    with_template(tokenizer, CHAT)
    end = tokenizer.id_of("<|endoftext|>")
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
    with pytest.raises(ValueError, match=r"system turn: .* question .*user turn: .*raw"):
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
    assert tokenizer.id_of(name) not in tokenizer.chat_ids(messages, about=name)


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_half_a_character_is_given_out_once(tokenizer: Tokenizer, sentencepiece: bool) -> None:
    """More stray bytes than are waited for, and a word behind them."""
    if sentencepiece:
        tokenizer = Tokenizer(spm_tokenizer())
        stray, words = 3 + 0x82, tokenizer.encode("is the quick")[1:].tolist()
    else:
        stray = next(i for i in range(300) if tokenizer.decode([i]) == "\ufffd")
        words = tokenizer.encode(" the cat").tolist()
    ids = [*[stray] * 17, *words]
    stream = TextStream(tokenizer)
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert any(pieces[:17])  # not held back to the end


def test_a_word_keeps_its_space_after_half_a_character() -> None:
    spm = Tokenizer(spm_tokenizer())
    words = spm.encode("is the quick")[-2:].tolist()
    stream = TextStream(spm)
    whole, stray = 3 + ord("A"), 3 + 0x82
    pieces = [*map(stream.push, [whole, stray, *words]), stream.finish()]
    assert "".join(pieces) == "A\ufffd the quick"
