"""What is being computed or written is found: by the next turn at once, and by equal prompts."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import pytest
from server.applications import ALICE, BOB, TENANTS, TEXT, WAY, cached, chat, serving
from server.serving import metric, post, wait_for

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.errors import CkvError
from ckv_jax.request import Generation
from ckv_jax.server.tenants import Tenants
from ckv_jax.storage.errors import StoreFull
from ckv_jax.storage.prefix import Prefix

LONG = TEXT * 8


def test_the_next_turn_finds_what_is_still_being_written(
    fresh: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = fresh.append

    def slowly(generation: Generation) -> Prefix:
        time.sleep(0.3)
        return append(generation)

    monkeypatch.setattr(fresh, "append", slowly)
    with serving(fresh) as url:
        messages = [{"role": "user", "content": TEXT}]
        for turn in range(4):
            answer = post(url, "chat/completions", WAY | {"messages": messages}).json()
            usage = answer["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            assert (found > usage["prompt_tokens"] - 48) == (turn > 0)
            assert (answer["ckv"]["waited_ms"] > 100) == (turn > 0)
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": "And then?"},
            ]


def test_equal_prompts_at_once_are_computed_once(fresh: Engine) -> None:
    with serving(fresh) as url, ThreadPoolExecutor(6) as pool:
        post(url, "chat/completions", chat("Hello"))  # compiled from here on
        body = chat(LONG, max_tokens=64)
        answers = list(pool.map(lambda _: post(url, "chat/completions", body).json(), range(6)))
        assert len({str(answer["choices"]) for answer in answers}) == 1
        prompt = answers[0]["usage"]["prompt_tokens"]
        found = sorted(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers)
        assert found[0] == 0
        assert found[1] >= prompt // 16 * 16 - 16
        waited = sorted(answer["ckv"]["waited_ms"] for answer in answers)
        assert waited[0] == 0 < waited[1]
        wait_for(lambda: metric(url, "ckv_stored_turns_total") >= 1)
        assert httpx.get(f"{url}/v1/status").json()["answers_in_progress"] == 0


def test_waiters_compute_if_the_first_request_is_cancelled(fresh: Engine) -> None:
    with serving(fresh) as url, ThreadPoolExecutor(2) as pool:
        body = chat(LONG, max_tokens=2000, stream=True)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as leader:
            lines = leader.iter_lines()
            others = [
                pool.submit(post, url, "chat/completions", chat(LONG, seed=seed)) for seed in (1, 2)
            ]
            next(lines)
        assert all(other.result().status_code == 200 for other in others)


@pytest.mark.parametrize("error", [StoreFull("full"), ValueError("a bug")])
def test_who_waits_for_what_cannot_be_written_computes(
    fresh: Engine, monkeypatch: pytest.MonkeyPatch, error: CkvError
) -> None:
    monkeypatch.setattr(fresh, "append", Mock(side_effect=error))
    with serving(fresh) as url, ThreadPoolExecutor(3) as pool:
        body = chat(LONG, max_tokens=32)
        answers = list(pool.map(lambda _: post(url, "chat/completions", body), range(3)))
        assert [cached(answer) for answer in answers] == [0, 0, 0]
        assert len({str(answer.json()["choices"]) for answer in answers}) == 1


def test_tenants_do_not_wait_for_each_other(fresh: Engine) -> None:
    with serving(fresh, Tenants(TENANTS)) as url, ThreadPoolExecutor(2) as pool:

        def ask(key: dict[str, str]) -> dict:
            return post(url, "chat/completions", chat(LONG), headers=key).json()

        for answer in pool.map(ask, (ALICE, BOB)):
            assert answer["ckv"]["waited_ms"] == 0
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_short_prompts_wait_for_nobody(fresh: Engine) -> None:
    with serving(fresh, store_tokens=10_000) as url, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: post(url, "chat/completions", chat(TEXT)), range(3)))
        assert {answer.json()["ckv"]["waited_ms"] for answer in answers} == {0}


def test_a_prompts_kv_is_what_an_ingest_stores(fresh: Engine) -> None:
    """A text that goes on gives its prompt away; its own tokens do not change."""
    tokens = fresh.encode(LONG, begins=True).tolist()[:300]
    request = Request(prefix=tokens[:-1], suffix=tokens[-1:], budget=1.0)
    plain = fresh.generate(request, SamplingParams(max_tokens=12)).results()[0]
    given: list[Generation] = []
    there = threading.Event()
    stream = fresh.generate(request, SamplingParams(max_tokens=12))
    stream._sequences[0].share(lambda generation: (given.append(generation), there.set()))
    shared = stream.results()[0]
    assert shared.token_ids.tolist() == plain.token_ids.tolist()
    assert there.wait(10)
    prefix = fresh.append(given[0])
    assert prefix.num_tokens == 300 // prefix.layout.chunk_tokens * prefix.layout.chunk_tokens
    assert prefix.tokens.tolist() == tokens[: prefix.num_tokens]
    over = Request(prefix=prefix, suffix=tokens[prefix.num_tokens :], budget=1.0)
    again = fresh.generate(over, SamplingParams(max_tokens=12)).results()[0]
    assert again.token_ids.tolist() == plain.token_ids.tolist()
