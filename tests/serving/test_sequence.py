"""One request's life, told by a clock of the test's own and without an engine."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckv_jax import Prefix, Request, SamplingParams
from ckv_jax.errors import Cancelled, CkvError, DeadlineExceeded
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.request import Generation, Result, TokenEvent
from ckv_jax.serving.jobs import Job, sequence_job
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


def test_a_request_by_itself_is_the_first_of_its_call_and_keeps_nothing() -> None:
    made = asked(SamplingParams())
    assert (made.index, made.keep_kv, made.apart) == (0, False, False)
    assert made.offloaded_chunks == 0
    with pytest.raises(ValueError, match="got int, expected SamplingParams"):
        Sequence(made.request, sampling=3)  # type: ignore[arg-type]


def test_the_time_in_the_queue_ends_when_the_batch_begins(clock: Clock) -> None:
    made = asked()
    clock.now += 3 * MS
    assert made.queued_ms == 3.0
    made.begin()
    clock.now += 9 * MS
    answer(made)
    assert result_of(made).queued_ms == 3.0


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


def test_a_text_ends_at_a_stop_token_and_tokens_may_be_given() -> None:
    made = begun(SamplingParams(max_tokens=9, forced_ids=(6, 3)))
    events: list[TokenEvent] = []
    made._listener = events.append
    for chosen in (1, 2):
        made.push(made.forced(chosen))
    assert made.reason == "stop" and made.token_ids == [6, 3] and made.forced(2) == 2
    assert [event.token_id for event in events] == [6, 3]


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


@pytest.mark.parametrize("suffix", [1, 14, 16, 20])
@pytest.mark.parametrize("before", [0, 5, 30])
def test_the_last_tokens_are_those_of_the_whole_prompt(before: int, suffix: int) -> None:
    made = asked()
    prefix = replace(NOTHING, tokens=np.arange(before, dtype=np.int32))
    for documents in ((), (prefix, prefix)):
        made.place(prefix, np.arange(100, 100 + suffix, dtype=np.int32), 1.0, documents)
        assert made.last_tokens == made.tokens[-16:].tolist()


def waits(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.05)
    return thread


def test_a_settled_result_waits_until_nothing_is_held() -> None:
    first, text = asked(), begun(SamplingParams(max_tokens=1))
    answer(first)
    text.push(5)
    text.finish_generation(None)
    for sequence, outcome in ((first, result_of), (text, generation_of)):
        plain = waits(lambda outcome=outcome, sequence=sequence: outcome(sequence))
        plain.join(20)
        assert not plain.is_alive()
        held = waits(lambda outcome=outcome, sequence=sequence: outcome(sequence, settled=True))
        assert held.is_alive()
        sequence.settle()
        held.join(20)
        assert not held.is_alive()


def test_the_first_outcome_stays() -> None:
    made = asked()
    made.fail(ValueError("bad"))
    made.fail(CkvError("worse"))
    made.crash(RuntimeError("broken"))
    answer(made)
    outcome = made.settled_result()
    assert type(outcome) is Result and str(outcome.error) == "bad"
    text = asked(SamplingParams())
    text.fail(ValueError("bad"))
    assert type(text.result()) is Generation
    text.finish_generation(None)  # it has not begun


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


def steps(*, error: Exception | None = None) -> Generator[None, None, str]:
    yield
    if error is not None:
        raise error
    return "done"


def test_a_job_is_done_once_its_steps_are() -> None:
    job = Job(steps())
    assert (job.num_bytes, job.ready()) == (0, True)
    assert job.advance() and not job.future.done()
    assert not job.advance() and job.future.result(0) == "done"
    job.fail(ValueError("late"))
    assert job.future.result(0) == "done"


def test_a_cancelled_job_ends_whatever_it_waits_for() -> None:
    closed: list[str] = []

    def waiting() -> Generator[None, None, None]:
        try:
            yield
            yield
        finally:
            closed.append("closed")

    job = Job(waiting(), ready=lambda: False)
    assert not job.ready() and job.advance()
    job.cancel()
    assert job.ready() and not job.advance()
    assert job.future.cancelled() and closed == ["closed"]
    failed = Job(steps())
    failed.end(CkvError("closed"))
    assert isinstance(failed.future.exception(0), CkvError)
    failed.cancel()
    assert not failed.advance()  # it has its outcome
    assert isinstance(failed.future.exception(0), CkvError)


@pytest.mark.parametrize("ends", ["done", "broken", "cancelled"])
def test_a_job_leaves_before_its_outcome_is_set(ends: str) -> None:
    told: list[bool] = []
    job = Job(steps(error=ValueError("bad") if ends == "broken" else None))

    def leave() -> None:
        told.append(job.future.done())

    assert job.advance(leave) and told == []
    if ends == "cancelled":
        job.cancel()
    assert not job.advance(leave)
    assert told == [False] and job.future.done()


def test_a_sequence_that_its_job_has_answered_settles_with_the_job() -> None:
    made, told = asked(), list[tuple[bool, bool]]()

    def answered() -> Generator[None, None, None]:
        made.finish(Result(request=made.request, trace=Trace()))
        return
        yield

    job, held = sequence_job(made, answered(), 5), waits(made.settled_result)

    def leave() -> None:
        held.join(0.2)  # who has been told ends meanwhile
        told.append((made.done(), held.is_alive()))

    assert not job.advance(leave)
    held.join(20)
    assert told == [(True, True)] and not held.is_alive()


def test_what_goes_wrong_in_a_sequences_job_is_its_own_outcome() -> None:
    for error in (ValueError("bad"), CkvError("bad")):
        made = asked()
        job = sequence_job(made, steps(error=error), 5)
        assert job.num_bytes == 5 and job.advance() and not job.advance()
        assert result_of(made).error is error
    made = asked()
    job = sequence_job(made, steps(error=RuntimeError("broken")), 5)
    assert job.advance() and not job.advance()
    with pytest.raises(RuntimeError, match="broken"):
        made.result(0)
    for cancelled in (False, True):
        made = asked()
        job = sequence_job(made, steps(), 5)
        assert job.advance()
        if cancelled:
            job.cancel()
        assert not job.advance() and not made.done()  # whoever made the job answers
