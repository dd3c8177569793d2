"""Messages of chats: what clients send, what the chat template takes, and reasoning split off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.server.bodies import Limits, load_json
from ckv_jax.server.http import ApiError

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


class Tolerant(BaseModel):
    """An object of OpenAI's API: its fields have their own types; others are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Part(Tolerant):
    """One part of a message's content."""

    type: Literal["text", "refusal", "input_text", "output_text"]
    text: str = ""
    refusal: str = ""


class FunctionCall(Tolerant):
    """A call of a function, as a model has made it."""

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
    """A finished call of a tool in a history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Message(Tolerant):
    """One message of a chat: whatever answers of ours or OpenAI's hold is taken back."""

    role: Role
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
            raise ValueError("content is missing")
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
    """Variables of a chat template; raises `ValueError` for names that are none."""
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
    return _CLOSE in tokenizer.chat_template or tokenizer.has_token(_CLOSE)


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


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return max(size for size in range(len(mark)) if text.endswith(mark[:size]))


def split(text: str, prompt_end: str) -> tuple[str, str]:
    """(reasoning, content) of a whole generation."""
    whole = Reasoning(prompt_end)
    pushed, rest = whole.push(text), whole.finish()
    return pushed[0] + rest[0], pushed[1] + rest[1]


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Variables of a chat template from a JSON object; raises `ValueError`."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"got {text!r}, expected a JSON object of variables of the chat template")
    return check_template_kwargs(values)
