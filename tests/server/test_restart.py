"""What was answered once is cheap ever after: across requests, kills, restarts and damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from segment_support import hurt
from server.serving import MODEL, Served, metric, wait_for

from ckv_jax.data.handbook import handbook

DOCUMENT = handbook()[:5000]
SETTINGS = ("--device-cache", 0, "--host-cache", 0, "--no-guard-disk")
WAY = {"model": MODEL, "max_tokens": 16, "temperature": 1.0, "seed": 5}


def ask(url: str, question: str, **more: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        return client.chat.completions.create(**WAY, messages=messages, **more)


def cached(answer: openai.types.chat.ChatCompletion) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarted") / "kv"


@pytest.fixture(scope="module")
def first(checkpoint: Path, store: Path) -> Iterator[Served]:
    server = Served(checkpoint, store, *SETTINGS)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def answers(first: Served) -> list[openai.types.chat.ChatCompletion]:
    """Of the first server: to a question, to the same once the text is stored, and to another."""
    lamp = ask(first.url, "Which lamp?")
    wait_for(lambda: metric(first.url, "ckv_stored_turns_total") == 1)
    return [lamp, ask(first.url, "Which lamp?"), ask(first.url, "How many doors are there?")]


@pytest.fixture(scope="module")
def texts(answers: list[openai.types.chat.ChatCompletion]) -> dict[str, str]:
    """Answers of the first server, by question."""
    lamp, _, doors = (answer.choices[0].message.content for answer in answers)
    return {"lamp": lamp, "doors": doors}


@pytest.fixture(scope="module")
def second(checkpoint: Path, store: Path, first: Served, texts: dict[str, str]) -> Iterator[Served]:
    """Another one over the store of the first, which is dead."""
    first.kill()
    server = Served(checkpoint, store, *SETTINGS)
    yield server
    server.kill()


def test_the_second_question_reads_what_the_first_computed(
    answers: list[openai.types.chat.ChatCompletion], texts: dict[str, str]
) -> None:
    lamp, again, doors = answers
    assert cached(lamp) == 0
    assert lamp.usage.prompt_tokens > 2048
    whole = lamp.usage.prompt_tokens // 16 * 16
    assert cached(again) >= whole - 16
    assert again.choices[0].message.content == texts["lamp"]
    assert cached(doors) >= whole - 32
    assert doors.model_extra["ckv"]["ssd_bytes"] > 0
    assert texts["doors"] != texts["lamp"]


def test_a_killed_server_has_lost_nothing(second: Served, texts: dict[str, str]) -> None:
    answer = ask(second.url, "Which lamp?")
    assert cached(answer) > 2000
    assert answer.choices[0].message.content == texts["lamp"]


def test_damage_is_computed_again_and_put_right(
    second: Served, store: Path, texts: dict[str, str]
) -> None:
    """The disk damages everything that a server has begun to read."""
    packs = list(store.glob("segments/*/*/packs/c.*"))
    assert packs
    for pack in packs:
        hurt(pack, pack.stat().st_size * 9 // 10)
    answer = ask(second.url, "How many doors are there?")
    assert answer.choices[0].message.content == texts["doors"]
    assert answer.model_extra["ckv"]["chunks_recomputed"] > 0
    assert metric(second.url, "ckv_recomputed_chunks_total") > 0
    wait_for(lambda: cached(ask(second.url, "How many doors are there?")) > 2000)
    mended = ask(second.url, "How many doors are there?")
    assert mended.choices[0].message.content == texts["doors"]
    assert mended.model_extra["ckv"]["chunks_recomputed"] == 0


def test_told_to_stop_it_ends_what_it_began(second: Served) -> None:
    """Told to stop, it refuses who comes, answers who is inside, and ends well."""
    body = WAY | {"messages": [{"role": "user", "content": "Count."}], "stream": True}
    body |= {"max_tokens": 200}
    with (
        httpx.Client(base_url=second.url, timeout=60) as other,
        httpx.stream("POST", f"{second.url}/v1/chat/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        assert other.get("/ready").status_code == 200
        second.process.terminate()
        wait_for(lambda: second.lines("draining"))
        late = other.post("/v1/chat/completions", json=body)
        assert late.status_code == other.get("/ready").status_code == 503
        assert late.json()["error"]["code"] == "draining"
        assert int(late.headers["retry-after"]) >= 1
        assert other.get("/health").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert second.stop() == 0
