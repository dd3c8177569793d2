"""The official client, sync and async, against a server as users start it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from server.serving import KEYS, MODEL, Served, metric, post, wait_for

ASKED = [
    {"role": "system", "content": "You know every lamp."},
    {"role": "user", "content": [{"type": "text", "text": "Which lamp is green?"}]},
]
WAY = {"model": MODEL, "messages": ASKED, "max_tokens": 12, "temperature": 1.0, "seed": 7}


def asking(served: Served, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with asking(served, KEYS["alice"]) as client:
        yield client


@pytest.fixture(scope="module")
def answer(client: openai.OpenAI) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(**WAY)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, f"{MODEL}:sparse"]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_goes_on(answer: openai.types.chat.ChatCompletion) -> None:
    (choice,) = answer.choices
    assert choice.finish_reason in ("length", "stop")
    assert choice.message.content
    usage = answer.usage
    assert usage.completion_tokens == 12 or choice.finish_reason == "stop"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_extra["ckv"]["budget"] == 1.0
    assert answer.model_extra["ckv"]["attention_covered"] == 1.0
    assert answer._request_id.startswith("req-")


def test_a_stream_is_the_same_text(
    client: openai.OpenAI, answer: openai.types.chat.ChatCompletion
) -> None:
    stream = client.chat.completions.create(
        **WAY, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    silent = list(client.chat.completions.create(**WAY, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in silent)


def test_the_stream_ends_as_events_do(served: Served) -> None:
    raw = post(
        served.url, "chat/completions", WAY | {"stream": True},
        headers={"authorization": f"Bearer {KEYS['alice']}"},
    )  # fmt: skip
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("\n\ndata: [DONE]\n\n")


def test_several_choices_differ_and_the_first_is_as_alone(
    client: openai.OpenAI, answer: openai.types.chat.ChatCompletion
) -> None:
    several = client.chat.completions.create(**WAY, n=3)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == answer.choices[0].message.content
    assert len(set(texts)) == 3
    assert several.usage.prompt_tokens == answer.usage.prompt_tokens
    chunks = list(client.chat.completions.create(**WAY, n=3, stream=True))
    streamed = [
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i)
        for i in range(3)
    ]
    assert streamed == texts


def test_logprobs(client: openai.OpenAI, answer: openai.types.chat.ChatCompletion) -> None:
    told = client.chat.completions.create(**WAY, logprobs=True, top_logprobs=2)
    content = told.choices[0].logprobs.content
    assert told.choices[0].message.content == answer.choices[0].message.content
    assert bytes(b for token in content for b in token.bytes).decode(errors="ignore")
    for token in content:
        best = [top.logprob for top in token.top_logprobs]
        assert len(best) == 2 and best == sorted(best, reverse=True)
        assert token.logprob <= best[0] < 0
    chunks = list(client.chat.completions.create(**WAY, logprobs=True, stream=True))
    parts = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [t.logprob for part in parts for t in part] == pytest.approx(
        [t.logprob for t in content], abs=1e-4
    )


def test_stop_strings_end_a_text(
    client: openai.OpenAI, answer: openai.types.chat.ChatCompletion
) -> None:
    text = answer.choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    cut = client.chat.completions.create(**WAY, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_plain_completions(client: openai.OpenAI) -> None:
    way = {"model": MODEL, "max_tokens": 6, "temperature": 1.0, "seed": 3}
    alone = client.completions.create(prompt="Once upon a time", logprobs=1, **way)
    both = client.completions.create(prompt=["Once upon a time", "The lamp"], **way)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == alone.choices[0].text
    assert len(alone.choices[0].logprobs.tokens) == 6
    assert "".join(alone.choices[0].logprobs.tokens).startswith(alone.choices[0].text[:1])
    by_ids = client.completions.create(prompt=[5, 6, 7], **way)
    assert by_ids.usage.prompt_tokens == 3
    parts = client.completions.create(prompt="Once upon a time", stream=True, **way)
    assert "".join(part.choices[0].text for part in parts) == alone.choices[0].text


def test_an_event_loop_of_clients(served: Served, answer: openai.types.chat.ChatCompletion) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=KEYS["alice"], max_retries=0
        ) as client:

            async def one(stream: bool) -> str:
                if not stream:
                    return (await client.chat.completions.create(**WAY)).choices[0].message.content
                parts = await client.chat.completions.create(**WAY, stream=True)
                return "".join([p.choices[0].delta.content or "" async for p in parts])

            return await asyncio.gather(*(one(i % 2 == 0) for i in range(6)))

    assert set(asyncio.run(ask())) == {answer.choices[0].message.content}


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 9000}, openai.BadRequestError, "context_length_exceeded"),
        (
            {"messages": [{"role": "user", "content": "lamp " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"n": 17}, openai.BadRequestError, "invalid_value"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "unsupported_value"),
        ({"messages": []}, openai.BadRequestError, "invalid_value"),
        ({"temperature": 3}, openai.BadRequestError, "invalid_value"),
        *(
            ({"extra_body": {"ckv": options}}, openai.BadRequestError, "invalid_value")
            for options in (
                {"budget": 0},
                {"budget": True},
                {"budget": []},
                {"budget": "mass:2"},
                {"mass": 0},
                {"mass": "much"},
                {"mass": 0.9, "budget": "mass:0.9"},
            )
        ),
        ({"extra_body": {"ckv": {"salt": "b"}}}, openai.BadRequestError, "unknown_parameter"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_told(
    client: openai.OpenAI, change: dict, error: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    with pytest.raises(error) as told:
        client.chat.completions.create(**(WAY | change), stream=stream)
    assert told.value.code == code
    assert told.value.body["message"]


def test_bodies_that_are_no_requests(served: Served) -> None:
    headers = {"authorization": f"Bearer {KEYS['alice']}", "content-type": "application/json"}
    half = b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}'
    for body in (b"", b"{", b"[]", b"1", b"\xff", b'{"a":' * 5000, b'{"model":NaN}', half):
        got = post(served.url, "chat/completions", None, content=body, headers=headers)
        assert got.status_code == 400, (body[:20], got.text)
        assert got.json()["error"]["message"]


def test_keys_are_asked_for(served: Served) -> None:
    for key in ("wrong", KEYS["alice"] + "x"):
        with asking(served, key) as stranger:
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
            with pytest.raises(openai.AuthenticationError) as told:
                stranger.chat.completions.create(**WAY)
        assert told.value.code == "invalid_api_key"
    assert post(served.url, "chat/completions", WAY).status_code == 401
    assert post(served.url, "nothing", WAY).json()["error"]["code"] == "not_found"


def test_a_tenant_has_as_many_requests_as_it_may(served: Served) -> None:
    with asking(served, KEYS["bob"]) as bob:
        with pytest.raises(openai.BadRequestError, match="at most 1"):
            bob.chat.completions.create(**WAY, n=2)
        with bob.chat.completions.create(**WAY | {"max_tokens": 2000}, stream=True) as running:
            next(running)
            with pytest.raises(openai.RateLimitError) as caught:
                bob.chat.completions.create(**WAY)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        wait_for(lambda: metric(served.url, "ckv_requests_running") == 0)
        assert bob.chat.completions.create(**WAY).choices


def test_the_log_has_no_text(served: Served, answer: openai.types.chat.ChatCompletion) -> None:
    log = served.log.read_text()
    (line,) = [r for r in served.lines("request") if r["id"] == answer._request_id]
    assert line["status"] == 200
    assert line["prompt_tokens"] == answer.usage.prompt_tokens
    assert "lamp" not in log
    assert not any(key in log for key in KEYS.values())
