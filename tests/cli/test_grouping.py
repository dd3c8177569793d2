"""Which lines of a file are answered together, and what their prompts share."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_jax.cli.beginnings import shared_beginnings
from ckv_jax.cli.jobs import Job
from ckv_jax.cli.turns import STAY, turns
from ckv_jax.model.sampling import SamplingParams


def jobs(texts: str) -> list[Job]:
    """A line for each letter, which is the text it stands on."""
    return [
        Job(line=line, digest="", id=str(line), prefix=text, question="?", budget=None,
            sampling=SamplingParams())
        for line, text in enumerate(texts)
    ]  # fmt: skip


def order(texts: str, size: int) -> list[list[int]]:
    found = turns(jobs(texts), size, text_of=lambda job: job.prefix)
    return [[job.line for job in batch] for batch in found]


def test_lines_over_one_text_follow_each_other_and_batches_are_full() -> None:
    assert order("abcabcab", 2) == [[0, 3], [6, 1], [4, 7], [2, 5]]
    assert order("aaa", 2) == [[0, 1], [2]]
    assert order("", 2) == []


def test_a_long_text_gives_way_to_lines_that_have_waited_longer() -> None:
    found = order("ab" + "a" * 40, 2)
    assert found[:STAY] == [[0, 2], *([n, n + 1] for n in range(3, 2 * STAY + 1, 2))]
    assert found[STAY][0] == 1  # the only line over b, of eight batches before
    assert sorted(itertools.chain(*found)) == list(range(42))


@settings(deadline=None)
@given(st.text("abc", max_size=60), st.integers(1, 5))
def test_every_line_once_and_none_behind_more_than_its_due(texts: str, size: int) -> None:
    flat = list(itertools.chain(*order(texts, size)))
    assert sorted(flat) == list(range(len(texts)))
    for place, line in enumerate(flat):
        others = set(texts[:line]) - {texts[line]}
        assert place <= line + STAY * size * (len(others) + 1)


def test_the_longest_beginning_that_another_has_too() -> None:
    text = np.arange(600)
    prompts = [
        np.concatenate([text[:500], [1, 2, 3]]),
        np.concatenate([text[:300], [9]]),
        np.concatenate([text[:500], [7]]),
        np.arange(600)[::-1],
        text[:300],
    ]
    assert shared_beginnings(prompts) == [500, 300, 500, 0, 299]
    assert shared_beginnings(prompts, least=400) == [500, 0, 500, 0, 0]
    assert shared_beginnings([text]) == [0] and shared_beginnings([]) == []


def test_two_prompts_alike_leave_a_token_to_ask() -> None:
    assert shared_beginnings([np.arange(300), np.arange(300)]) == [299, 299]


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=8), max_size=8))
def test_as_a_comparison_of_all_with_all(prompts: list[list[int]]) -> None:
    expected = [
        min(
            len(one) - 1,
            max((_common(one, two) for two in prompts[:i] + prompts[i + 1 :]), default=0),
        )
        for i, one in enumerate(prompts)
    ]
    assert shared_beginnings([np.array(x, np.int32) for x in prompts], least=1) == expected


def _common(one: list[int], two: list[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    return sum(1 for _ in pairs)
