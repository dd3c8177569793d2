"""Who is served when, told by the order of what happens and by no clock."""

from __future__ import annotations

from itertools import islice

import pytest
from engine_support import tokens

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.storage.prefix import Prefix

ENDLESS = 1900


@pytest.fixture(scope="module")
def prefixes(engine: Engine) -> list[Prefix]:
    return [engine.ingest(tokens(60, seed)) for seed in range(3)]


def test_two_endless_texts_both_go_on(engine: Engine, prefixes: list[Prefix]) -> None:
    """Each gives ten tokens while the other has not come to its end, and then ten more."""
    sampling = SamplingParams(max_tokens=ENDLESS)
    with (
        engine.generate(Request(prefix=prefixes[0], suffix=[1, 2]), sampling) as first,
        engine.generate(Request(prefix=prefixes[1], suffix=[3]), sampling) as second,
    ):
        seen: dict[int, list[int | None]] = {0: [], 1: []}
        for _ in range(2):
            for index, stream in enumerate((second, first)):
                seen[index] += [event.token_id for event in islice(stream, 10)]
        first.cancel()
        second.cancel()
        texts = [stream.results()[0] for stream in (second, first)]
    for index, text in enumerate(texts):
        assert text.finish_reason == "cancelled", "the other one had to end first"
        assert text.token_ids.tolist()[:20] == seen[index]
        assert 20 <= len(text.token_ids) < ENDLESS


def test_a_question_is_answered_beside_an_endless_text(
    engine: Engine, prefixes: list[Prefix]
) -> None:
    with engine.generate(
        Request(prefix=prefixes[0], suffix=[1, 2]), SamplingParams(max_tokens=ENDLESS)
    ) as stream:
        next(stream)
        (answer,) = engine.reprefill([Request(prefix=prefixes[2], suffix=[5])])
        answer.raise_for_error()
        stored = engine.ingest(tokens(80, 103))
        assert stored.num_tokens == 80
        stream.cancel()
        (text,) = stream.results()
    assert text.finish_reason == "cancelled" and len(text.token_ids) < ENDLESS
