"""Chat messages, tools and answer formats, and parsing of reasoning and tool calls in answers."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ckv_jax.engine import Engine
from ckv_jax.model.grammar import Grammar, GrammarKind
from ckv_jax.model.tokenizer import Tokenizer, overlap
from ckv_jax.server.bodies import Limits, load_json
from ckv_jax.server.http import ApiError, invalid

_ROLES = {"developer": "system", "function": "tool"}  # as chat templates name them
_OPEN, _CLOSE = "<think>", "</think>"
_RESERVED = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("conversations", "self"),
        *("documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)
"""Keywords of `apply_chat_template` that are no variables of a template."""
_ARGUMENTS = Limits(max_bytes=1 << 20, items=4096)
_MOST_TOOLS = 128
_MOST_CALLS = 16
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""A model that may write white space anywhere may do so for ever."""
_REASONS = ("expected", "it is not compiled", "nothing", "Unimplemented keys")

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Json = dict[str, Any]


# -- what a request says ---------------------------------------------------------------------------


class Tolerant(BaseModel):
    """An object of OpenAI's API: its fields have their own types; others are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Part(Tolerant):
    """One part of a message's content."""

    type: Literal["text", "refusal", "input_text", "output_text"]
    text: str = ""
    refusal: str = ""


class FunctionCall(Tolerant):
    """A function call that a model has made."""

    name: str
    arguments: str | dict[str, Any] = "{}"

    def rendered(self) -> dict[str, Any]:
        """As templates take it: arguments that are a JSON object are one."""
        arguments = self.arguments
        if isinstance(arguments, str):
            try:
                found = load_json(arguments.encode("utf-8", "surrogatepass"), _ARGUMENTS)
            except ApiError:
                found = None
            arguments = found if isinstance(found, dict) else arguments
        return {"name": self.name, "arguments": arguments}


class ToolCall(Tolerant):
    """A tool call in the history of a chat."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Tolerant):
    """One message of a chat. It accepts all fields of answers of this server and of OpenAI's."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError("got no content, expected a text")
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or part.refusal for part in self.content)

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        values: dict[str, Any] = {"role": _ROLES.get(self.role, self.role), "content": self.text}
        calls = [call.function for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append(self.function_call)
        if calls:
            ids = [call.id for call in self.tool_calls or ()] + [None]
            values["tool_calls"] = [
                {"type": "function", "function": call.rendered()} | ({"id": id_} if id_ else {})
                for call, id_ in zip(calls, ids, strict=False)
            ]
        if self.tool_call_id is not None:
            values["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            values["name"] = self.name
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            values["reasoning_content"] = reasoning
        return values


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


def check_template_kwargs(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the names of chat template variables; raises `ValueError` for an invalid one."""
    for name in values:
        if not name.isidentifier() or name in _RESERVED:
            raise ValueError("expected names of variables of the chat template")
    return dict(values)


def effort(tokenizer: Tokenizer, level: str | None) -> dict[str, Any]:
    """A reasoning effort as variables of the chat template, as far as that has any for it."""
    if level is None:
        return {}
    source = tokenizer.chat_template
    found: dict[str, Any] = {}
    if "reasoning_effort" in source:
        found["reasoning_effort"] = level
    if "enable_thinking" in source:
        found["enable_thinking"] = level != "none"
    return found


# -- reasoning -------------------------------------------------------------------------------------


def reasons(tokenizer: Tokenizer) -> bool:
    """Whether a model marks its reasoning: its vocabulary or its template has the marks."""
    return _CLOSE in tokenizer.chat_template or tokenizer.id_of(_CLOSE) is not None


class Reasoning:
    """Splits the reasoning off one generation as it comes.

    A generation reasons from its start if the prompt's end opens that, or it begins with the mark
    itself. Pieces of each part joined are the whole of it; marks are in neither.
    """

    def __init__(self, prompt_end: str) -> None:
        self._state = "reasoning" if prompt_end.rstrip().endswith(_OPEN) else "start"
        self._held = ""
        self._begins = True  # nothing of the reasoning is there yet

    def push(self, text: str) -> tuple[str, str]:
        """(more of the reasoning, more of the content) of a piece of text."""
        held, self._held = self._held + text, ""
        if self._state == "start":
            begun = held.lstrip()
            if begun.startswith(_OPEN):
                self._state, held = "reasoning", begun.removeprefix(_OPEN)
            elif _OPEN.startswith(begun):
                self._held = held
                return "", ""
            else:
                self._state = "content"
        if self._state == "reasoning":
            if self._begins:
                held = held.lstrip("\n")
                self._begins = not held
            reasoning, mark, rest = held.partition(_CLOSE)
            if mark:
                self._state = "gap"
                return reasoning.removesuffix("\n"), self._content(rest)
            kept = max(overlap(held, mark) for mark in (_CLOSE, f"\n{_CLOSE}"))
            self._held = held[len(held) - kept :]
            return held[: len(held) - kept], ""
        return "", self._content(held)

    def finish(self) -> tuple[str, str]:
        """The same of what was held back, as nothing follows."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "reasoning" else ("", held)

    def _content(self, text: str) -> str:
        """Content, without the empty lines that follow the reasoning."""
        if self._state == "gap":
            text = text.lstrip("\n")
            if text:
                self._state = "content"
        return text


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Variables of a chat template from a JSON object; raises `ValueError`."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"got {text!r}, expected a JSON object of variables of the chat template")
    return check_template_kwargs(values)


# -- tools and forms of answers --------------------------------------------------------------------


class Function(Tolerant):
    """A function that a model may call."""

    name: Name
    description: str | None = None
    parameters: Json | None = None


class Tool(Tolerant):
    """A tool that a model may call: a function."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Tolerant):
    """The name of a function."""

    name: Name


class NamedTool(Tolerant):
    """A tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=_MOST_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class JsonSchema(Tolerant):
    """A JSON schema with a name."""

    name: str | None = None
    schema_: Json | None = Field(default=None, validation_alias="schema")


class AnswerFormat(Tolerant):
    """`response_format`: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> AnswerFormat:
        schema = self.json_schema
        if self.type == "json_schema" and (schema is None or schema.schema_ is None):
            raise ValueError("expected json_schema with a schema")
        return self


Choices = Annotated[list[str], Field(min_length=1, max_length=4096)]


class StructuredOutputs(Tolerant):
    """vLLM's `structured_outputs`: one of these."""

    json_: str | Json | None = Field(default=None, validation_alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


def compiled(engine: Engine, field: str, kind: GrammarKind, value: Any) -> Grammar:
    """A grammar from a field. Raises `ApiError`, which repeats no value."""
    try:
        return engine.grammar(kind, value)
    except ValueError as error:
        reason = str(error)
        if not reason.startswith(_REASONS):
            reason = "it is invalid, too complex, or uses unsupported features"
        raise invalid(f"{field}: {reason}", param=field, code="invalid_grammar") from error


# -- how families write calls ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """The format in which a family of models writes tool calls."""

    opens: tuple[str, ...]
    """Strings that begin a call."""
    name: Literal["hermes", "llama", "mistral"]
    renders: bool
    """Whether the chat template takes tools."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> CallStyle:
        """As the chat template has it; Qwen's where it has none."""
        template = tokenizer.chat_template
        renders = "tools" in template
        if "[TOOL_CALLS]" in template or tokenizer.id_of("[TOOL_CALLS]") is not None:
            return cls(name="mistral", opens=("[TOOL_CALLS]",), renders=renders)
        if "<tool_call>" not in template and "python_tag" in template:
            return cls(name="llama", opens=("<|python_tag|>", "{"), renders=renders)
        return cls(name="hermes", opens=("<tool_call>",), renders=renders)

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, *, parallel: bool) -> str:
        """Calls of these tools in Lark, one at least, and one at most unless `parallel`."""
        arguments = "parameters" if self.name == "llama" else "arguments"
        rules = []
        for number, tool in enumerate(tools):
            parameters = dict(tool.function.parameters or {"type": "object"})
            schema: Json = {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, arguments: parameters},
                "required": ["name", arguments],
                "additionalProperties": False,
                "x-guidance": _SEPARATORS,
            }
            for shared in ("$defs", "definitions"):  # references begin at the root
                if shared in parameters:
                    schema[shared] = parameters.pop(shared)
            rules.append(f"call{number}: %json {json.dumps(schema)}")
        call = f"({' | '.join(f'call{number}' for number in range(len(tools)))})"

        def several(one: str, between: str) -> str:
            more = f" ({between} {one}){{0,{_MOST_CALLS - 1}}}" if parallel else ""
            return f"{one}{more}"

        if self.name == "llama":
            start = call
        elif self.name == "mistral":
            mark = _literal("[TOOL_CALLS]", tokenizer)
            calls = several(call, '", "')
            start = f'{mark} "[" {calls} "]"'
        else:
            one = f'{_literal("<tool_call>", tokenizer)} "\\n" {call} "\\n" '
            one += _literal("</tool_call>", tokenizer)
            start = several(one, '"\\n"')
        return "\n".join([f"start: {start}", *rules])


_CALL_END = "</tool_call>"
_HEAD = re.compile(
    r"(?:<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\])?\s*(?:"
    r'\[?\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
    r"|(?P<plain>[\w.-]+)(?:\[ARGS\])?\s*(?=\{))"
)
"""A call up to its arguments, in any style."""


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """A text in Lark; by its id, if it is a control token."""
    id_ = tokenizer.id_of(text)
    return f"<[{id_}]>" if id_ in tokenizer.control_ids else json.dumps(text)


class CallParser:
    """Finds calls of tools in one generation as it comes.

    A call is sure once its name is there and its arguments begin; then they come as they are
    written. Others, such as those without arguments, come with the end of the generation.
    """

    def __init__(self, style: CallStyle) -> None:
        self._style = style
        self._held = ""
        self._state: Literal["content", "head", "arguments", "between", "rest"] = "content"
        self._depth = 0  # of the arguments
        self._quoted = self._escaped = False  # within a string of theirs
        self._count = 0

    @property
    def called(self) -> bool:
        """Whether there are calls, none of which was cut short."""
        return self._count > 0 and self._state != "arguments"

    def push(self, text: str) -> tuple[str, list[Json]]:
        """(more of the content, more of the calls) of a piece of text; calls as OpenAI's streams
        have them, with an `index` each."""
        self._held += text
        content, deltas = "", list[Json]()
        steps = {
            "content": self._before_calls, "head": self._head, "arguments": self._arguments,
            "between": self._between, "rest": self._rest,
        }  # fmt: skip
        state = None
        while state != self._state:
            state = self._state
            more, found = steps[state]()
            content += more
            deltas += found
        return content, _merged(deltas)

    def finish(self) -> tuple[str, list[Json]]:
        """The same of what was held back, as nothing follows. What is no complete call is
        content."""
        held, self._held = self._held, ""
        if self._state == "arguments":
            return "", []
        calls = _parse(self._style.name, held)
        if calls is None:
            return held, []
        return "", [
            self._begun(name, json.dumps(arguments, ensure_ascii=False))
            for name, arguments in calls
        ]

    def _begun(self, name: str, arguments: str = "") -> Json:
        self._count += 1
        return {
            "index": self._count - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _before_calls(self) -> tuple[str, list[Json]]:
        if self._style.name == "llama":  # a call is the first of an answer
            rest = self._held.lstrip()
            if any(rest.startswith(mark) for mark in self._style.opens):
                self._state = "head"
            elif rest and not any(mark.startswith(rest) for mark in self._style.opens):
                self._state = "rest"
            return "", []
        (mark,) = self._style.opens
        content, found, rest = self._held.partition(mark)
        if found:
            self._state, self._held = "head", found + rest
            return content.rstrip("\n"), []
        sure = self._held[: len(self._held) - overlap(self._held, mark)].rstrip("\n")
        self._held = self._held[len(sure) :]
        return sure, []

    def _head(self) -> tuple[str, list[Json]]:
        if (found := _HEAD.match(self._held)) is None:
            return "", []
        name = found["plain"]
        if name is None:
            try:
                name = json.loads(found["name"])
            except ValueError:
                return "", []
        self._state, self._held = "arguments", self._held[found.end() :]
        return "", [self._begun(name)]

    def _arguments(self) -> tuple[str, list[Json]]:
        end = len(self._held)
        for at, character in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._state, end = "between", at + 1
                    break
        piece, self._held = self._held[:end], self._held[end:]
        delta = {"index": self._count - 1, "function": {"arguments": piece}}
        return "", [delta] if piece else []

    def _between(self) -> tuple[str, list[Json]]:
        rest = self._held.lstrip(" \n\t,;]}").removeprefix(_CALL_END).lstrip()
        bare = () if self._style.name == "hermes" else ("{",)
        marks = (*self._style.opens, *bare)
        self._held = rest
        if any(rest.startswith(mark) for mark in marks):
            self._state = "head"
        elif rest and not any(mark.startswith(rest) for mark in (*marks, _CALL_END)):
            self._state = "rest" if self._style.name == "llama" else "content"
        return "", []

    def _rest(self) -> tuple[str, list[Json]]:
        content, self._held = self._held, ""
        return content, []


def joined(deltas: Sequence[Json]) -> list[Json]:
    """Whole calls of the pieces that a stream has."""
    return [{k: v for k, v in call.items() if k != "index"} for call in _merged(deltas)]


def _merged(deltas: Sequence[Json]) -> list[Json]:
    """One piece for each call."""
    merged: dict[int, Json] = {}
    for delta in deltas:
        if (before := merged.get(delta["index"])) is None:
            merged[delta["index"]] = delta | {"function": dict(delta["function"])}
        else:
            before["function"]["arguments"] += delta["function"]["arguments"]
    return list(merged.values())


def _parse(style: str, text: str) -> list[tuple[str, Json]] | None:
    """(name, arguments) of the calls in a text; None: it is no list of calls."""
    text = text.strip()
    if style == "hermes":
        if not text.startswith("<tool_call>"):
            return None
        pieces = [piece.strip() for piece in text.split("<tool_call>")[1:]]
        # The last call may lack its end, where that is a token that ended the generation.
        return _calls([piece.removesuffix("</tool_call>") for piece in pieces])
    if style == "mistral":
        if not text.startswith("[TOOL_CALLS]"):
            return None
        pieces = text.split("[TOOL_CALLS]")[1:]
        if len(pieces) == 1 and pieces[0].lstrip().startswith("["):
            return _calls(pieces)
        named = [piece.replace("[ARGS]", "").partition("{") for piece in pieces]
        return _calls(
            [f'{{"name": {json.dumps(n.strip())}, "arguments": {o}{a}}}' for n, o, a in named]
        )
    text = text.removeprefix("<|python_tag|>").strip()
    decoder, pieces, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        pieces.append(text[at:end])
        at = end
        while at < len(text) and text[at] in "; \n":
            at += 1
    return _calls(pieces) if pieces else None


def _calls(pieces: Sequence[str]) -> list[tuple[str, Json]] | None:
    found: list[tuple[str, Json]] = []
    for piece in pieces:
        try:
            value = json.loads(piece)
        except (ValueError, RecursionError):
            return None
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict) or not isinstance(one.get("name"), str):
                return None
            arguments = one.get("arguments", one.get("parameters", {}))
            if not isinstance(arguments, dict):
                return None
            found.append((one["name"], arguments))
    return found or None
