"""`/v1/messages`: Anthropic's messages, an adapter over chats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from ckv_jax.engine import Engine
from ckv_jax.request import Generation
from ckv_jax.server.formats import ChatFormat
from ckv_jax.server.messages import Tolerant
from ckv_jax.server.schema import CkvOptions, Count, ParsedRequest

Json = dict[str, Any]
_SAME = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class TextBlock(Tolerant):
    """A text of the system's."""

    text: str


class AnthropicMessage(Tolerant):
    """One message: a text, or blocks of text, calls of tools and their results."""

    role: str
    content: str | list[Json]

    def rendered(self) -> list[Json]:
        """As messages of a chat: each result of a tool is one. Raises `ValueError`."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        texts, calls, results = [], [], []
        for block in self.content:
            kind = block.get("type")
            if kind == "text":
                texts.append({"type": "text", "text": block.get("text")})
            elif kind == "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "tool_result":
                content = block.get("content") or ""
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                results.append(result | {"content": content})
            elif kind not in ("thinking", "redacted_thinking"):
                raise ValueError("messages: expected blocks of text, tool_use and tool_result")
        own: Json = {"role": self.role, "content": texts or None}
        if calls:
            own["tool_calls"] = calls
        return results + ([own] if texts or calls or not results else [])


class MessagesRequest(Tolerant):
    """`POST /v1/messages`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    max_tokens: Count
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: str | list[TextBlock] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    ckv: CkvOptions = CkvOptions()

    def chat(self) -> Json:
        """The body of the same request to `/v1/chat/completions`. Raises `ValueError`."""
        body: Json = {name: getattr(self, name) for name in _SAME}
        system = self.system
        if isinstance(system, list):
            system = "\n\n".join(block.text for block in system)
        first = [{"role": "system", "content": system}] if system else []
        body["messages"] = [*first, *(one for each in self.messages for one in each.rendered())]
        body["stop"] = self.stop_sequences or None
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
        body["tools"] = [
            {"type": "function", "function": {to: tool.get(name) for name, to in names.items()}}
            for tool in self.tools or ()
        ]
        choice = self.tool_choice or {}
        if choice.get("type") == "tool":
            named = {"name": choice.get("name")}
            body["tool_choice"] = {"type": "function", "function": named}
        elif choice:
            body["tool_choice"] = _CHOICES.get(str(choice.get("type")), "")
        if choice.get("disable_parallel_tool_use"):
            body["parallel_tool_calls"] = False
        body["ckv"] = self.ckv.model_dump(exclude_none=True)
        return body


class MessagesFormat(ChatFormat):
    """A `message` and its events, made of a chat's."""

    id_prefix = "msg"
    named_events = True

    def __init__(self, request: ParsedRequest, engine: Engine, body: MessagesRequest) -> None:
        super().__init__(request, engine)
        self._stops = body.stop_sequences or []
        self._index = 0
        self._open = False
        self._ended: str | None = None

    def whole(self, generations: Sequence[Generation]) -> Json:
        chat = super().whole(generations)
        (choice,) = chat["choices"]
        message = choice["message"]
        content: list[Json] = []
        if reasoning := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            content.append(block | {"input": arguments})
        whole = self._message(content, chat["usage"])
        return whole | self._reason(choice["finish_reason"], generations) | {"ckv": chat["ckv"]}

    def events(self, chunk: Json) -> list[Json]:
        (choice,) = chunk["choices"]
        delta, found = choice["delta"], []
        if "role" in delta:
            found.append({"type": "message_start", "message": self._message([], None)})
        if text := delta.get("content"):
            if not self._open:
                found.append(self._block_start({"type": "text", "text": ""}))
            found.append(self._block_delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                found += self._block_stop()
                name = call["function"]["name"]
                block = {"type": "tool_use", "id": call["id"], "name": name, "input": {}}
                found.append(self._block_start(block))
                continue
            partial = call["function"]["arguments"]
            found.append(self._block_delta({"type": "input_json_delta", "partial_json": partial}))
        if choice["finish_reason"] is not None:
            found += self._block_stop()
            self._ended = choice["finish_reason"]
        return found

    def closing(self, generations: Sequence[Generation]) -> list[Json]:
        usage = _usage(self.usage(generations)["usage"])
        delta = self._reason(self._ended, generations)
        return [
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]

    def _block_start(self, block: Json) -> Json:
        self._open = True
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _block_delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _block_stop(self) -> list[Json]:
        if not self._open:
            return []
        self._open = False
        self._index += 1
        return [{"type": "content_block_stop", "index": self._index - 1}]

    def _reason(self, reason: str | None, generations: Sequence[Generation]) -> Json:
        """Why it ended, and by which of the request's texts."""
        stopped = None
        if reason == "stop" and self._stops:
            generation = generations[0]
            said = self._tokenizer.decode(generation.token_ids.tolist())
            rest = said[len(generation.text) :]
            stopped = next((stop for stop in self._stops if rest.startswith(stop)), None)
        why = "stop_sequence" if stopped is not None else _REASONS[reason or "stop"]
        return {"stop_reason": why, "stop_sequence": stopped}

    def _message(self, content: list[Json], usage: Json | None) -> Json:
        before = {"prompt_tokens": self._request.prompt_tokens, "completion_tokens": 0}
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage or before),
        }


def _usage(usage: Json) -> Json:
    """Tokens as Anthropic counts them: those from the store apart."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
