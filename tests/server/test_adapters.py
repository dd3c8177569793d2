"""`/v1/responses` by OpenAI's client, `/v1/messages` by Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

pytest.importorskip("llguidance")

from server.applications import ALICE, TENANTS, TEXT, serving
from server.serving import KEYS, MODEL, post
from server.test_tools import CLOCK, SCHEMA, TEMPLATE

from ckv_jax import CkvError, Engine
from ckv_jax.server import adapters, messages
from ckv_jax.server.adapters import Conversations, MessagesFormat, ResponsesFormat
from ckv_jax.server.formats import ChatFormat
from ckv_jax.server.http import ApiError
from ckv_jax.server.tenants import Tenants

PARAMETERS = CLOCK["function"]["parameters"]


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine, Tenants(TENANTS)) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.tokenizer._backend, "chat_template", TEMPLATE)
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    base = f"{url}/v1"
    with openai.OpenAI(base_url=base, api_key=KEYS["alice"], max_retries=0) as client:
        yield client


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEYS["alice"], max_retries=0) as client:
        yield client


# -- responses -------------------------------------------------------------------------------------


def test_a_response_goes_on_from_another(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input=TEXT, instructions="Be brief.", max_output_tokens=16, temperature=0
    )
    assert (first.status, first.usage and first.usage.output_tokens) == ("incomplete", 16)
    assert first.output_text
    more: Any = {"model": MODEL, "input": "And then?", "max_output_tokens": 8, "temperature": 0}
    second = client.responses.create(**more, previous_response_id=first.id)
    whole = client.chat.completions.create(
        model=MODEL, max_tokens=8, temperature=0,
        messages=[
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And then?"},
        ],
    )  # fmt: skip
    assert second.output_text == whole.choices[0].message.content
    bob = client.with_options(api_key=KEYS["bob"])
    with pytest.raises(openai.NotFoundError):
        bob.responses.create(**more, previous_response_id=first.id)
    gone = client.responses.create(**more, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**more, previous_response_id=gone.id)


def test_events_of_a_response_are_its_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": [{"role": "user", "content": "Hi"}], "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=12)
    with client.responses.stream(**asked, extra_body={"max_output_tokens": 12}) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    text = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_a_tool(client: openai.OpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "name": "clock", "parameters": PARAMETERS, "strict": True}]
    asked: Any = {"model": MODEL, "input": "Time?", "tools": tools, "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "max_output_tokens": 120}
    if stream:
        events = list(client.responses.create(**asked, stream=True))
        last = events[-1]
        assert last.type == "response.completed"
        response = last.response
    else:
        response = client.responses.create(**asked)
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    last = client.responses.create(
        model=MODEL, input=[result], previous_response_id=response.id, max_output_tokens=4
    )
    assert last.usage is not None


def test_a_response_follows_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    found = client.responses.create(
        model=MODEL, input="How long?", text=form, max_output_tokens=150
    )
    assert json.loads(found.output_text).keys() == {"days"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {"input": [{"type": "image"}]}, "input"),
        *(
            ("responses", {"input": [{"type": "reasoning", "content": content}]}, "input")
            for content in ("CANARY", 5, ["CANARY"], [{}], [{"text": None}])
        ),
        ("responses", {"input": [{"role": "CANARY", "content": "a"}]}, "messages.0.role"),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}, "input"),
        (
            "messages",
            {"max_tokens": 4, "messages": [{"role": "user", "content": [{}]}]},
            "messages",
        ),
        ("messages", {"messages": [{"role": "user", "content": "a"}]}, "max_tokens"),
    ],
)
def test_what_is_refused(url: str, path: str, body: dict, param: str) -> None:
    answer = post(url, path, {"model": MODEL} | body, headers=ALICE)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "CANARY" not in answer.text
    assert post(url, path, {"model": MODEL} | body).status_code == 401


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused(url: str, number: str) -> None:
    tool = f'{{"type": "function", "name": "f", "parameters": {{"maximum": {number}}}}}'
    body = f'{{"model": "{MODEL}", "input": "a", "max_output_tokens": 1, "tools": [{tool}]}}'
    answer = post(url, "responses", None, content=body, headers=ALICE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_an_error_within_a_stream_is_raised(
    client: openai.OpenAI, claude: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise CkvError("the disk does not answer")

    for form in (ChatFormat, ResponsesFormat, MessagesFormat):
        monkeypatch.setattr(form, "closing", broken)
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    later = "try again later"
    with pytest.raises(openai.APIError, match=later):
        list(client.chat.completions.create(**ask, stream=True))
    with pytest.raises(openai.APIError, match=later):
        list(client.responses.create(model=MODEL, input="Hi", max_output_tokens=4, stream=True))
    with pytest.raises(anthropic.APIStatusError, match=later) as caught:
        list(claude.messages.create(**ask, stream=True))
    assert caught.value.body["type"] == "error"  # type: ignore[call-overload, index]


# -- messages --------------------------------------------------------------------------------------


def test_a_message_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL, "max_tokens": 12, "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    whole = claude.messages.create(**asked)
    (block,) = whole.content
    assert block.type == "text" and block.text
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().stop_reason == "max_tokens"
    stop = block.text[2:4]
    stopped = claude.messages.create(**asked, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


THINKS: Any = {
    "model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": "Hi"}],
    "extra_body": {"temperature": 0},
}  # fmt: skip


@pytest.fixture
def thinking(engine: Engine, claude: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model marks its reasoning, and ends it before its answer to `THINKS` ends."""
    template = TEMPLATE + "{# </think> #}<think>"
    monkeypatch.setattr(engine.tokenizer._backend, "chat_template", template)
    (thought,) = claude.messages.create(**THINKS).content
    assert thought.type == "thinking" and len(thought.thinking) > 10
    mark = thought.thinking[5:8]
    monkeypatch.setattr(messages, "_CLOSE", mark)  # this model never closes what it thinks
    monkeypatch.setattr(engine.tokenizer._backend, "chat_template", template + f"{{# {mark} #}}")


@pytest.mark.usefixtures("thinking")
def test_a_response_has_its_reasoning_as_an_item(client: openai.OpenAI) -> None:
    """Before the message, streamed or whole; given back, it is accepted."""
    asked: Any = {
        "model": MODEL, "max_output_tokens": 24, "input": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
    }  # fmt: skip
    whole = client.responses.create(**asked)
    thought, said = whole.output
    assert (thought.type, said.type) == ("reasoning", "message")
    assert thought.content and whole.output_text == said.content[0].text  # type: ignore[union-attr]
    assert whole.usage and 0 < whole.usage.output_tokens_details.reasoning_tokens < 24
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    streamed = events[-1].response  # type: ignore[union-attr]
    assert [one.content[0].text for one in streamed.output] == [  # type: ignore[union-attr, index]
        one.content[0].text
        for one in whole.output  # type: ignore[union-attr, index]
    ]
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == thought.content[0].text
    kinds = [event.type for event in events]
    for kind in (
        "output_item.added",
        "content_part.added",
        "content_part.done",
        "output_item.done",
    ):
        assert kinds.count(f"response.{kind}") == 2  # type: ignore[comparison-overlap]
    again = [*asked["input"], *(one.model_dump(exclude_none=True) for one in whole.output)]
    later = client.responses.create(
        **asked | {"input": [*again, {"role": "user", "content": "So?"}]}
    )
    kept = client.responses.create(**asked | {"input": "So?"}, previous_response_id=whole.id)
    assert later.usage and kept.usage
    assert later.usage.input_tokens == kept.usage.input_tokens


@pytest.mark.usefixtures("thinking")
def test_a_message_streams_its_reasoning(claude: anthropic.Anthropic) -> None:
    """As blocks of their own, before the text, as the whole message has it."""
    whole = claude.messages.create(**THINKS)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    with claude.messages.stream(**THINKS) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [b.model_dump() for b in streamed.content] == [b.model_dump() for b in whole.content]
    assert events.count("content_block_start") == events.count("content_block_stop") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_uses_a_tool(claude: anthropic.Anthropic, stream: bool) -> None:
    tools: Any = [{"name": "clock", "description": "The time.", "input_schema": PARAMETERS}]
    history: Any = [{"role": "user", "content": "Time?"}]
    asked: Any = {
        "model": MODEL, "max_tokens": 120, "tools": tools, "messages": history,
        "tool_choice": {"type": "tool", "name": "clock"},
    }  # fmt: skip
    if stream:
        with claude.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**asked)
    (block,) = message.content
    assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
    assert block.input["zone"] in ("UTC", "CET")  # type: ignore[index, union-attr]
    used: Any = block.model_dump(include={"type", "id", "name", "input"})
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "noon"}
    history += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    after = claude.messages.create(model=MODEL, max_tokens=4, tools=tools, messages=history)
    assert after.usage.output_tokens == 4


def test_one_tenant_does_not_push_out_the_responses_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "_MOST_KEPT", 4)
    monkeypatch.setattr(adapters, "_MOST_CHARACTERS", 4000)
    kept = Conversations()
    kept.keep("b", "first", [{"role": "user", "content": "x"}])
    for number in range(50):
        kept.keep("a", str(number), [{"role": "user", "content": "x"}])
    kept.keep("a", "long", [{"role": "user", "content": "x" * 2900}])
    assert kept.of("b", "first") and kept.of("a", "long")
    for salt, gone in (("a", "1"), ("a", "first"), ("b", "long"), ("c", "first")):
        with pytest.raises(ApiError):
            kept.of(salt, gone)
    kept.keep("a", "longest", [{"role": "user", "content": "x" * 4001}])
    with pytest.raises(ApiError):
        kept.of("a", "longest")
    assert kept.of("b", "first")
