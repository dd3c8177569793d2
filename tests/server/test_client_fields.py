"""Fields that clients send: taken, ignored, or refused by name; histories; templates."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.applications import TEXT, WAY, chat, serving
from server.serving import MODEL, post

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.model.tokenizer import Tokenizer, load_tokenizer
from ckv_jax.server.config import ServerConfig
from ckv_jax.server.messages import Message, Reasoning, effort, parse_template_kwargs

CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": 3}'}}
HISTORY = [
    {"role": "user", "content": "what time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    {"role": "user", "content": "thanks"},
]
TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% endfor %}"
)
THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def plain(url: str) -> list[dict]:
    """The choices of an answer to a request without any field of its own."""
    return post(url, "chat/completions", chat("Hello")).json()["choices"]


@pytest.fixture
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(checkpoint)


# -- fields ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {
            "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "u",
            "service_tier": "auto", "store": False, "metadata": {"a": "b"}, "user": "u",
            "verbosity": "low", "modalities": ["text"], "surprise": {"deep": [1, 2]},
        },
        {
            "repetition_penalty": 1.0, "min_p": 0, "top_k": -1, "best_of": 1,
            "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {},
            "parallel_tool_calls": True, "tools": [], "tool_choice": "auto",
            "response_format": {"type": "text"}, "skip_special_tokens": True,
            "add_generation_prompt": True,
            "stream_options": {"include_usage": True, "anything": 1},
        },
        {"stop": None, "n": None, "stream_options": None, "tools": None},
    ],
)  # fmt: skip
def test_what_changes_no_answer_is_taken(url: str, plain: list[dict], fields: dict) -> None:
    taken = post(url, "chat/completions", chat("Hello", **fields))
    assert taken.status_code == 200, taken.text
    assert taken.json()["choices"] == plain


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"repetition_penalty": True},
        {"presence_penalty": False},
        {"min_p": 0.1},
        {"logit_bias": {"5": 3}},
        {"tool_choice": "required"},
        {"modalities": ["text", "audio"]},
        {"store": True},
        {"chat_template": "{{ messages }}"},
        {"documents": [{"text": "a"}]},
        {"best_of": 3},
        {"suffix": "end"},
        {"echo": True},
        {"chat_template_kwargs": {"tokenize": False}},
        {"chat_template_kwargs": {"a b": 1}},
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(url: str, field: dict) -> None:
    refused = post(url, "chat/completions", chat("Hello", **field))
    assert refused.status_code == 400
    assert next(iter(field)) in refused.json()["error"]["message"]


def test_an_ignored_field_is_logged_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ckv_jax.server"), serving(engine) as url:
        for _ in range(2):
            post(url, "chat/completions", chat("Hello", surprise=1, user="u"))
    named = [r.fields["field"] for r in caplog.records if r.getMessage() == "field_ignored"]
    assert sorted(named) == ["surprise", "user"]


# -- messages --------------------------------------------------------------------------------------


def test_an_answers_own_message_goes_back(url: str) -> None:
    """As the OpenAI client's documentation shows it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        first = [{"role": "user", "content": "Hello"}]
        said = client.chat.completions.create(messages=first, **WAY).choices[0].message
        for message in (
            said,
            said.model_dump(),
            said.model_dump()
            | {"refusal": None, "annotations": [], "audio": None, "reasoning_content": "hm"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": None, "refusal": "No."},
        ):
            history = [*first, message, {"role": "user", "content": "and then?"}]
            assert client.chat.completions.create(messages=history, **WAY).choices


def test_finished_calls_of_tools_are_rendered_as_templates_take_them(
    url: str, tokenizer: Tokenizer
) -> None:
    assert post(url, "chat/completions", WAY | {"messages": HISTORY}).status_code == 200
    tokenizer._backend.chat_template = TOOLS
    rendered = [Message.model_validate(message).rendered() for message in HISTORY]
    text = tokenizer.apply_chat(rendered)
    assert text == (
        '<user>what time is it?<assistant><call>clock {"zone": 3}</call><tool>noon<user>thanks'
    )
    old = {"role": "assistant", "content": "", "function_call": CALL["function"]}
    (call,) = Message.model_validate(old).rendered()["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": {"zone": 3}}
    answer = {"role": "function", "name": "clock", "content": "noon"}
    assert Message.model_validate(answer).rendered()["role"] == "tool"
    for arguments in ("no json", "[1]", "[" * 9999):
        wrong = {"function": {"name": "f", "arguments": arguments}}
        message = Message.model_validate({"role": "assistant", "tool_calls": [wrong]})
        assert message.rendered()["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages.0"),
        ({"role": "user"}, "messages.0"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages.0.tool_calls.0.function"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content"),
        ({"role": "nobody", "content": ""}, "messages.0.role"),
    ],
)
def test_a_wrong_message_is_named(url: str, message: dict, param: str) -> None:
    refused = post(url, "chat/completions", WAY | {"messages": [message]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(param)


# -- templates -------------------------------------------------------------------------------------


def test_variables_reach_the_template(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer._backend, "chat_template", THINKS)

    def prompt_tokens(url: str, **more: object) -> int:
        told = post(url, "chat/completions", chat("Hello", **more))
        assert told.status_code == 200, told.text
        return told.json()["usage"]["prompt_tokens"]

    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    with serving(engine) as url:
        plain = prompt_tokens(url)
        assert prompt_tokens(url, chat_template_kwargs=off) > plain
        assert prompt_tokens(url, chat_template_kwargs=on) == plain
        assert prompt_tokens(url, reasoning_effort="none") > plain
        assert prompt_tokens(url, reasoning_effort="high") == plain
    with serving(engine, chat_template_kwargs=off) as url:
        assert prompt_tokens(url) > plain
        assert prompt_tokens(url, chat_template_kwargs=on) == plain
    text = engine.tokenizer.decode(engine.chat("Hello", **off).tolist())
    assert text == engine.tokenizer._backend.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True, **off
    )


def test_efforts_that_a_template_does_not_know_change_nothing(tokenizer: Tokenizer) -> None:
    assert effort(tokenizer, "low") == {}
    tokenizer._backend.chat_template = "{{ reasoning_effort }}"
    assert effort(tokenizer, "low") == {"reasoning_effort": "low"}
    assert effort(tokenizer, None) == {}


def test_a_servers_own_variables_are_checked() -> None:
    assert parse_template_kwargs('{"enable_thinking": false}') == {"enable_thinking": False}
    for wrong in ("", "[]", '{"tools": []}', '{"self": 1}'):
        with pytest.raises(ValueError, match="expected"):
            parse_template_kwargs(wrong)
    assert ServerConfig(model="m").chat_template_kwargs == {}


# -- reasoning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "prompt_end", "parts"),
    [
        ("plain", "", ("", "plain")),
        ("<think>\nhm\n</think>\n\nso", "", ("hm", "so")),
        ("hm\n</think>\n\nso", "assistant\n<think>\n", ("hm", "so")),
        ("never ends", "<think>", ("never ends", "")),
        ("a <think> b", "", ("", "a <think> b")),
        ("so", "<think>\n\n</think>\n\n", ("", "so")),
        ("<thin", "", ("", "<thin")),
        ("<think></think>", "", ("", "")),
        ("", "", ("", "")),
    ],
)
def test_reasoning_is_split_off(text: str, prompt_end: str, parts: tuple[str, str]) -> None:
    whole = Reasoning(prompt_end)
    pushed, rest = whole.push(text), whole.finish()
    assert (pushed[0] + rest[0], pushed[1] + rest[1]) == parts


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "<", "th", "ink>", "</", "\n", "a", "</thi"]),
        max_size=9,
    ),
    opened=st.booleans(),
)
def test_pieces_of_reasoning_joined_are_the_whole(pieces: list[str], opened: bool) -> None:
    end = "<think>\n" if opened else ""
    whole, streamed = Reasoning(end), Reasoning(end)
    first, rest = whole.push("".join(pieces)), whole.finish()
    found = [streamed.push(piece) for piece in pieces] + [streamed.finish()]
    assert "".join(part[0] for part in found) == first[0] + rest[0]
    assert "".join(part[1] for part in found) == first[1] + rest[1]


def test_an_answer_has_its_reasoning_apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    monkeypatch.setattr(engine.tokenizer._backend, "chat_template", opened)
    with serving(engine) as url:
        told = post(url, "chat/completions", chat(TEXT)).json()["choices"][0]["message"]
        assert told["reasoning_content"] and told["content"] == ""
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
            chunks = list(client.chat.completions.create(**chat(TEXT, stream=True)))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert streamed == told["reasoning_content"]
        assert not any(delta.content for delta in deltas)


# -- what benchmarks ask for -----------------------------------------------------------------------


def test_a_text_has_the_tokens_that_it_must(url: str, engine: Engine) -> None:
    body = WAY | {"prompt": TEXT, "max_tokens": 12, "logprobs": 0}
    free = post(url, "completions", body).json()
    first = free["choices"][0]["logprobs"]["tokens"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        ids = client.completions.create(**body, extra_body={"return_tokens_as_token_ids": True})
        assert ids.choices[0].logprobs.tokens == first  # a hint without effect
    said = free["choices"][0]["text"]
    short = post(url, "completions", body | {"stop": said[1:3]}).json()
    assert short["usage"]["completion_tokens"] < 12
    full = post(url, "completions", body | {"stop": said[1:3], "min_tokens": 12}).json()
    assert full["usage"]["completion_tokens"] == 12
    assert full["choices"][0]["text"] == said
    tokens = engine.encode(TEXT, begins=True).tolist()
    request = Request(prefix=tokens[:-1], suffix=tokens[-1:], budget=1.0)
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=WAY["seed"])
    ends = {
        "stop_token_ids": engine.generate(request, sampling).results()[0].token_ids[3:4].tolist()
    }
    ended = post(url, "completions", body | ends).json()
    assert ended["usage"]["completion_tokens"] < 12
    long = post(url, "completions", body | ends | {"min_tokens": 12}).json()
    assert long["usage"]["completion_tokens"] == 12
    assert post(url, "completions", body | {"min_tokens": 13}).status_code == 400
    assert post(url, "completions", body | {"ignore_eos": True}).status_code == 200


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_each_piece_may_have_the_usage_so_far(url: str, path: str) -> None:
    body = {"completions": WAY | {"prompt": "Hello"}, "chat/completions": chat("Hello")}[path]
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = post(url, path, body | {"stream": True, "stream_options": options})
    events = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == events[-1]["usage"]["completion_tokens"] == 8
    assert events[-1]["choices"] == []
    plain = post(url, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert plain.text.count('"usage"') == 1


def test_clients_may_leave_the_model_out_of_no_request(url: str) -> None:
    refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert refused.json()["error"]["code"] == "missing"
    assert refused.json()["error"]["param"] == "model"
    assert MODEL not in refused.text
