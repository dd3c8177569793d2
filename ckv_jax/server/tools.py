"""Tools and formats of answers: as grammars before an answer, and parsed from its text after it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ckv_jax.engine import Engine
from ckv_jax.model.grammar import Grammar, GrammarKind
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.server.http import invalid
from ckv_jax.server.messages import Tolerant, overlap

_MOST_TOOLS = 128
_MOST_CALLS = 16
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""A model that may write white space anywhere may do so for ever."""
_REASONS = ("expected", "it is not compiled", "nothing", "Unimplemented keys")

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Json = dict[str, Any]


# -- what a request says ---------------------------------------------------------------------------


class Function(Tolerant):
    """A function that a model may call."""

    name: Name
    description: str | None = None
    parameters: Json | None = None


class Tool(Tolerant):
    """A tool: functions alone."""

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
    """A schema by its name."""

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


def wanted(
    given: Sequence[tuple[str, GrammarKind, Any]],
) -> tuple[str, GrammarKind, Any] | None:
    """The one of `given`, (field, kind, value), that has a value; None: none has. Raises `ApiError`
    for two."""
    found = [one for one in given if one[2] is not None]
    if len(found) > 1:
        raise invalid(f"{found[1][0]}: expected one format of answers, not two", param=found[1][0])
    return found[0] if found else None


def compiled(engine: Engine, field: str, kind: GrammarKind, value: Any) -> Grammar:
    """A grammar from a field. Raises `ApiError`, which repeats no value."""
    try:
        return engine.grammar(kind, value)
    except ValueError as error:
        reason = str(error)
        if not reason.startswith(_REASONS):
            reason = "it is wrong, too complex, or has what is not supported"
        raise invalid(f"{field}: {reason}", param=field, code="invalid_grammar") from error


# -- how families write calls ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStyle:
    """How a family of models writes calls of tools."""

    opens: tuple[str, ...]
    """What a call begins with, whichever comes first."""
    name: Literal["hermes", "llama", "mistral"]
    renders: bool
    """Whether the chat template takes tools."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> CallStyle:
        """As the chat template has it; Qwen's where it has none."""
        template = tokenizer.chat_template
        renders = "tools" in template
        if "[TOOL_CALLS]" in template or tokenizer.has_token("[TOOL_CALLS]"):
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


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """A text in Lark; by its id, if it is a control token."""
    id_ = tokenizer.id_of(text)
    return f"<[{id_}]>" if id_ in tokenizer.control_ids else json.dumps(text)


class CallParser:
    """Finds calls of tools in one generation as it comes."""

    def __init__(self, style: CallStyle) -> None:
        self._style = style
        self._held = ""
        self._begun = self._calling = False

    def push(self, text: str) -> str:
        """More of the content: what comes before calls."""
        self._held += text
        if self._calling:
            return ""
        if self._style.name == "llama":  # a call is the whole of an answer
            rest = self._held.lstrip()
            if self._begun or (
                rest and not any(_begins(rest, open_) for open_ in self._style.opens)
            ):
                content, self._held, self._begun = self._held, "", True
                return content
            return ""
        (mark,) = self._style.opens
        content, found, rest = self._held.partition(mark)
        if found:
            self._calling, self._held = True, found + rest
            return content.rstrip("\n")
        sure = self._held[: len(self._held) - overlap(self._held, mark)].rstrip("\n")
        content, self._held = sure, self._held[len(sure) :]
        return content

    def finish(self) -> tuple[str, list[Json]]:
        """(the rest of the content, calls as OpenAI has them), as nothing follows. What is no
        complete call is content."""
        held, self._held = self._held, ""
        calls = _parse(self._style.name, held)
        if calls is None:
            return held, []
        return "", [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for name, arguments in calls
        ]


def _begins(text: str, mark: str) -> bool:
    return text.startswith(mark) or mark.startswith(text)


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
