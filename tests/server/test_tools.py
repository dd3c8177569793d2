"""Formats of answers and calls of tools, by the OpenAI client; texts of each family's calls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance")

from server.applications import ALICE, BOB, TENANTS, WAY, chat, serving
from server.serving import MODEL, post

from ckv_jax import Engine
from ckv_jax.server.messages import CallParser, CallStyle, joined
from ckv_jax.server.tenants import Tenants

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
LAMP = {
    "type": "function",
    "function": {
        "name": "lamp",
        "parameters": {
            "type": "object",
            "properties": {"on": {"$ref": "#/$defs/Switch"}},
            "required": ["on"],
            "additionalProperties": False,
            "$defs": {"Switch": {"type": "boolean"}},
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["days"],
    "additionalProperties": False,
}
ASKED: list[Any] = [{"role": "user", "content": "What time is it?"}]


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.tokenizer._backend, "chat_template", TEMPLATE)
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def schema_format(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": schema_format(SCHEMA)},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_answers_follow_a_schema(url: str, field: dict) -> None:
    body = chat("How long?", **field) | {"max_tokens": 150}
    (choice,) = post(url, "chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]).keys() == {"days"}


def test_other_formats_streamed_and_of_completions(client: openai.OpenAI, url: str) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=ASKED, stream=True, max_tokens=30, seed=1, temperature=1,
        extra_body={"guided_choice": ["yes", "no way"]},
    )  # fmt: skip
    assert "".join(piece.choices[0].delta.content or "" for piece in stream) in ("yes", "no way")
    body = WAY | {"prompt": "Code:", "guided_regex": "[0-9]{3}-[a-f]{2}", "max_tokens": 30}
    (choice,) = post(url, "completions", body).json()["choices"]
    assert (len(choice["text"]), choice["text"][3]) == (6, "-")
    (choice,) = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=1, response_format={"type": "json_object"}
    ).choices
    assert choice.finish_reason == "length"
    assert (choice.message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("field", "param"),
    [
        (
            {"response_format": schema_format({"type": "CANARY"})},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "CANARY"}, "guided_json"),
        ({"guided_regex": "(CANARY"}, "guided_regex"),
        ({"guided_grammar": "CANARY"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "x" * 70_000}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"tool_choice": "required"}, None),
        ({"tools": [CLOCK], "tool_choice": LAMP}, None),
        ({"tools": [CLOCK], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [CLOCK] * 200}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_is_refused(url: str, field: dict, param: str | None) -> None:
    answer = post(url, "chat/completions", chat("Hello", **field))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "CANARY" not in answer.text


def test_grammars_hold_up_no_request_without_one_and_none_of_another_tenant(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they compile, and however many."""
    release, compiling, real = threading.Event(), threading.Event(), engine.grammar

    def slow(kind: Any, value: Any) -> Any:
        if value == "[ab]":
            compiling.set()
            assert release.wait(60)
            raise ValueError("it is too complex")
        return real(kind, value)

    monkeypatch.setattr(engine, "grammar", slow)
    flood = chat("Hello", guided_regex="[ab]")
    with serving(engine, Tenants(TENANTS), max_requests=120) as url, ThreadPoolExecutor(50) as pool:
        answers = [
            pool.submit(post, url, "chat/completions", flood, headers=ALICE) for _ in range(50)
        ]
        try:
            assert compiling.wait(60)
            time.sleep(0.5)
            for key, field in ((ALICE, {}), (BOB, {"guided_regex": "[cd]"})):
                answer = post(url, "chat/completions", chat("Hello", **field), headers=key)
                assert answer.status_code == 200
            assert answer.json()["choices"][0]["message"]["content"] in ("c", "d")
            assert not any(one.done() for one in answers)
        finally:
            release.set()
        assert {one.result().status_code for one in answers} == {400}


@pytest.mark.parametrize("stream", [False, True])
def test_the_loop_of_tools(client: openai.OpenAI, stream: bool) -> None:
    """As OpenAI's documentation has it: ask, call, give back what came of it, ask again."""
    asked: dict[str, Any] = {
        "model": MODEL, "messages": ASKED, "tools": [CLOCK, LAMP], "tool_choice": "required",
        "max_tokens": 120, "parallel_tool_calls": False, "seed": 2,
    }  # fmt: skip
    if stream:
        with client.chat.completions.stream(**asked) as pieces:
            (choice,) = pieces.get_final_completion().choices
    else:
        (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == ({"zone"} if call.function.name == "clock" else {"on"})
    history = [
        *ASKED,
        choice.message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]
    (last,) = client.chat.completions.create(
        model=MODEL, messages=history, tools=[CLOCK, LAMP], max_tokens=4
    ).choices
    assert last.message.tool_calls is None


def test_a_stream_has_the_arguments_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False,
        "max_tokens": 120, "seed": 2, "temperature": 1,
    }  # fmt: skip
    whole = client.chat.completions.create(messages=ASKED, **asked).choices[0].message
    (expected,) = whole.tool_calls or []
    deltas = [
        delta
        for piece in client.chat.completions.create(messages=ASKED, stream=True, **asked)
        for delta in piece.choices[0].delta.tool_calls or ()
    ]
    assert [delta.function.name for delta in deltas if delta.id] == ["clock"]
    pieces = [delta.function.arguments for delta in deltas if delta.function.arguments]
    assert len(pieces) > 3
    assert "".join(pieces) == expected.function.arguments
    assert {delta.index for delta in deltas} == {0}


def test_a_named_tool(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "lamp"}}
    (choice,) = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[CLOCK, LAMP], tool_choice=named, max_tokens=120
    ).choices
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "lamp"


HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
CALLS = [
    ("hermes", HERMES, "", [("f", {"a": 1})]),
    ("hermes", f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.", [("f", {"a": 1})] * 2),
    ("hermes", f"{HERMES}\nSo it is.", "So it is.", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "}\\\\\\"</tool_call>{", "b": [{}]}}',
        "",
        [("f", {"a": '}\\"</tool_call>{', "b": [{}]})],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "f"}, {"name": "g", "arguments": {}}]</tool_call>',
        "",
        [("f", {}), ("g", {})],
    ),
    *[
        ("hermes", text, text, [])
        for text in (
            '<tool_call>{"name": "f"} blah</tool_call>',
            '<tool_call>[{"name": "f"}, {"a": 1}]</tool_call>',
        )
    ],
    ("hermes", "a < b", "a < b", []),
    ("hermes", '<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu', []),
    ("llama", LLAMA, "", [("f", {"a": 1})]),
    ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("f", {"a": 1})] * 2),
    ("llama", f"\n<|python_tag|>{LLAMA}", "", [("f", {"a": 1})]),
    ("llama", '\n<|python_tag|>{"name": "f"}', "", [("f", {})]),
    ("llama", '{"name": "f"}\n{"name": "g"}\n', "", [("f", {}), ("g", {})]),
    ("llama", f'{{"name": "f"}}; {LLAMA}', "", [("f", {}), ("f", {"a": 1})]),
    *[
        ("llama", text, text, [])
        for text in (
            '{"weather": 3}',
            '\n{"weather": 3}',
            '{"name": "Ada", "age": 36}\n\nThat is the record.',
            '{"name": "Ada", "age": 36}\n{"weather": 3}',
        )
    ],
    ("llama", "It is noon {.", "It is noon {.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", {"a": 1}), ("g", {})]),
    ("mistral", '[TOOL_CALLS] [{"name": "f"}, {"name": "g"}]', "", [("f", {}), ("g", {})]),
    ("mistral", '[TOOL_CALLS] [] {"a": 1}', '[TOOL_CALLS] [] {"a": 1}', []),
    ("mistral", "no [brackets]", "no [brackets]", []),
]
OPENS = {"hermes": ("<tool_call>",), "mistral": ("[TOOL_CALLS]",), "llama": ("<|python_tag|>", "{")}


@pytest.mark.parametrize(("name", "text", "content", "expected"), CALLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_however_they_come(
    name: Any, text: str, content: str, expected: list, size: int
) -> None:
    parser = CallParser(CallStyle(name=name, opens=OPENS[name], renders=True))
    pieces = [parser.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(parser.finish())
    assert "".join(piece for piece, _ in pieces) == content
    calls = joined([delta for _, deltas in pieces for delta in deltas])
    assert parser.called == bool(expected)
    found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    assert found == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", HERMES),
        ("llama", LLAMA),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]f{"a": 1}'),
    ],
)
def test_arguments_come_as_they_are_written(name: Any, text: str) -> None:
    parser = CallParser(CallStyle(name=name, opens=OPENS[name], renders=True))
    begins = text.index('"a"') - 1
    _, (begun,) = parser.push(text[: begins + 1])
    assert begun["function"] == {"name": "f", "arguments": "{"}
    assert parser.push('"a": ') == ("", [{"index": 0, "function": {"arguments": '"a": '}}])
    assert not parser.called
    assert parser.finish() == ("", [])  # cut short
    assert not parser.called


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
def test_calls_that_a_grammar_makes_are_found(engine: Engine, name: Any) -> None:
    from ckv_jax.server.messages import Tool

    style = CallStyle(name=name, opens=OPENS[name], renders=True)
    tools = [Tool.model_validate(CLOCK), Tool.model_validate(LAMP)]
    grammar = engine.grammar("lark", style.grammar(tools, engine.tokenizer, parallel=True))
    texts = {
        "hermes": '<tool_call>\n{"name": "lamp", "arguments": {"on": true}}\n</tool_call>',
        "llama": '{"name": "lamp", "parameters": {"on": true}}',
        "mistral": '[TOOL_CALLS][{"name": "lamp", "arguments": {"on": true}}]',
    }
    matcher = grammar.matcher()
    for token in engine.tokenizer.encode(texts[name]).tolist():
        assert matcher.allowed(engine.model_config.vocab_size, [])[token]
        matcher.push(token)
    parser = CallParser(style)
    (call,) = joined(parser.push(texts[name])[1] + parser.finish()[1])
    assert call["function"] == {"name": "lamp", "arguments": '{"on": true}'}
