"""One request's life, told by a clock of the test's own and without an engine."""

from __future__ import annotations

import pytest

from ckv_jax import SamplingParams
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.serving.sequence import OutputText
from tests.model.small import write_tokenizer

# -- the text of a generation --------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def test_without_a_tokenizer_there_are_tokens_alone() -> None:
    text = OutputText(None, SamplingParams(stop_token_ids=(4,)), [3])
    assert [text.push(token) for token in (1, 2)] == [("", False)] * 2
    assert [text.push(token) for token in (3, 4)] == [("", True)] * 2
    assert [text.ends(token) for token in (1, 3, 4)] == [False, True, True]
    assert text.text == text.finish() == ""


def test_a_text_goes_on_until_a_token_or_words_that_end_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat sat").tolist()
    end = tokenizer.vocab_size - 1
    text = OutputText(tokenizer, SamplingParams(), [end])
    said = [text.push(token) for token in ids]
    assert not any(ended for _, ended in said)
    assert text.push(end) == ("", True)
    assert "".join(piece for piece, _ in said) + text.finish() == text.text == "the cat sat"
    stopped = OutputText(tokenizer, SamplingParams(stop=("sat",)), [end])
    assert [stopped.push(token)[1] for token in ids][-1]
    assert stopped.text == "the cat "


def test_what_is_held_back_comes_at_the_end(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, SamplingParams(stop=("sat down",)), [])
    said = "".join(text.push(token)[0] for token in tokenizer.encode("the cat sat").tolist())
    assert said == "the cat " and text.finish() == "sat" and text.text == "the cat sat"
