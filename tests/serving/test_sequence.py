"""One request's life, told by a clock of the test's own and without an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckv_jax import Prefix, Request, SamplingParams
from ckv_jax.errors import Cancelled, DeadlineExceeded
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.serving.sequence import OutputText, Sequence, generation_of, result_of
from ckv_jax.trace import Trace
from tests.model.small import write_tokenizer
from tests.support.truth import FINGERPRINT
from tests.support.truth import SMALL as LAYOUT

MS = 1_000_000
NOTHING = Prefix.empty(FINGERPRINT, LAYOUT, "")
CODED = replace(LAYOUT, codec="int8:1", codec_bytes=64)
STORED = replace(NOTHING, tokens=np.arange(5, dtype=np.int32), layout=CODED)


class Clock:
    """Stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 5_000 * MS

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("ckv_jax.serving.sequence.time", made)
    return made


def asked(
    sampling: SamplingParams | None = None, prefix: Prefix = NOTHING, **more: Any
) -> Sequence:
    made = Sequence(Request(prefix=prefix, suffix=[7, 8], **more), sampling=sampling)
    made.place(prefix, np.array([7, 8], np.int32), 0.5)
    return made


def begun(sampling: SamplingParams) -> Sequence:
    made = asked(sampling)
    made.begin_generation(OutputText(None, sampling, [3]), Trace())
    return made


def answer(sequence: Sequence) -> None:
    sequence.answer(4, "four", np.zeros(8, np.float32), Trace())


def test_a_deadline_has_passed_once_more_than_that_has(clock: Clock) -> None:
    endless, made = asked(), asked(deadline_s=2)
    clock.now += 2_000 * MS
    assert made.lapsed() is None and not made.fail_if_lapsed()
    clock.now += 1
    assert str(made.lapsed()) == "got no answer within 2 s"
    assert made.fail_if_lapsed() and not endless.fail_if_lapsed()
    assert isinstance(result_of(made).error, DeadlineExceeded) and not endless.done()


def test_decoding_takes_from_the_first_token_to_the_last(clock: Clock) -> None:
    made = begun(SamplingParams(max_tokens=2))
    clock.now += 4 * MS
    made.push(5)
    assert made.reason is None
    clock.now += 2 * MS
    made.push(6)
    assert made.reason == "length"
    clock.now += 100 * MS
    made.finish_generation(None)
    assert generation_of(made).decode_ms == 6.0


@pytest.mark.parametrize("late", [False, True])
def test_a_cancelled_generation_has_the_tokens_so_far(clock: Clock, late: bool) -> None:
    begins, goes_on, ended = (begun(SamplingParams(max_tokens=9)) for _ in range(3))
    for text in (begins, goes_on, ended):
        text.request = replace(text.request, deadline_s=1.0)
        text.check()
        assert text.reason is None
    goes_on.push(5)
    ended.push(3)
    for text in (begins, goes_on, ended):
        if late:
            clock.now += 1_001 * MS
        else:
            text.cancel()
        text.check()
    why = "deadline" if late else "cancelled"
    assert [text.reason for text in (begins, goes_on, ended)] == [why, why, "stop"]
    assert isinstance(generation_of(begins).error, DeadlineExceeded if late else Cancelled)
    assert not goes_on.done() and not ended.done()


def test_an_answer_names_the_codec_of_what_it_was_read_from() -> None:
    joined = asked(prefix=replace(NOTHING, layout=CODED))
    joined.documents = (STORED, STORED)
    assert joined.tokens.tolist() == [0, 1, 2, 3, 4] * 2 + [7, 8]
    for made, codec in (
        (asked(prefix=STORED), "int8:1"),
        (joined, "int8:1"),
        (asked(prefix=replace(NOTHING, layout=CODED)), "none"),
    ):
        answer(made)
        assert result_of(made).codec == codec


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


# -- jobs -----------------------------------------------------------------------------------------
