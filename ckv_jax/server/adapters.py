"""`/v1/responses` and `/v1/messages`: the APIs of OpenAI and Anthropic, converted to chats."""

from __future__ import annotations

import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ckv_jax.engine import Engine
from ckv_jax.request import Generation
from ckv_jax.server.formats import ChatFormat, usage
from ckv_jax.server.http import ApiError
from ckv_jax.server.messages import Tolerant
from ckv_jax.server.parser import ParsedRequest
from ckv_jax.server.schema import CkvOptions, Count

Json = dict[str, Any]
_MOST_KEPT = 4096
_MOST_CHARACTERS = 64 << 20
_SAME_IN_RESPONSES = ("model", "stream", "temperature", "top_p", "parallel_tool_calls")
_SAME_IN_MESSAGES = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FIELDS = (("reasoning_text", "reasoning_content"), ("output_text", "content"))
"""A kind of text in a response, and the field of a chat's message that has it."""
_ITEMS: dict[str, tuple[str, Json]] = {
    "reasoning_text": ("rs", {"type": "reasoning", "summary": []}),
    "output_text": ("msg", {"type": "message", "role": "assistant"}),
}
_LOGPROBS: dict[str, Json] = {"reasoning_text": {}, "output_text": {"logprobs": []}}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


# -- OpenAI's responses ----------------------------------------------------------------------------


class TextOptions(Tolerant):
    """The form of a response's text."""

    format: Json | None = None
    """As `response_format` of chats, with the fields of `json_schema` next to its `type`."""


class ResponsesRequest(Tolerant):
    """`POST /v1/responses`."""

    model: str
    input: str | Annotated[list[Json], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=100)] | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Json | None = None
    """Its `effort` is a variable for the chat template, if that has one."""
    background: Literal[False] | None = None
    ckv: CkvOptions = CkvOptions()

    def messages(self) -> list[Json]:
        """The input as messages of a chat. Raises `ValueError` for items of other kinds."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Json] = []
        reasoning = ""
        for item in self.input:
            if item.get("type") == "reasoning":
                reasoning = _reasoning(item)
                continue
            message = _message(item)
            if reasoning and message["role"] == "assistant":
                message["reasoning_content"] = reasoning
            messages.append(message)
            reasoning = ""
        return messages

    def chat(self, history: Sequence[Json]) -> Json:
        """The body of the same request to `/v1/chat/completions`, after `history`."""
        body: Json = {name: getattr(self, name) for name in _SAME_IN_RESPONSES}
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        body["messages"] = [*system, *history, *self.messages()]
        body["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            body["tools"] = [_tool(tool) for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": "function", "function": {"name": choice["name"]}}
        body["tool_choice"] = choice
        form = self.text and self.text.format
        if form and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        body["response_format"] = form or None
        if self.reasoning and self.reasoning.get("effort"):
            body["reasoning_effort"] = self.reasoning["effort"]
        body["ckv"] = self.ckv.model_dump(exclude_none=True)
        return body


def _reasoning(item: Json) -> str:
    """Returns the text of a reasoning item; "" if it has only a summary. Raises `ValueError`."""
    parts = item.get("content") or []
    try:
        return "".join([part["text"] for part in parts])
    except (TypeError, KeyError):
        raise ValueError("input: expected reasoning whose content is a list of texts") from None


def _message(item: Json) -> Json:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind != "message":
        kinds = "messages, reasoning, function_call and function_call_output"
        raise ValueError(f"input: expected {kinds}")
    return {"role": item.get("role"), "content": item.get("content")}


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise ValueError("tools: expected functions alone")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


class Conversations:
    """Messages of earlier responses, by tenant and id, while this process runs. Their KV is in the
    store as of any chat. The oldest of the tenant that holds most are forgotten. Used in one event
    loop."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[str, tuple[list[Json], int]]] = {}
        self._characters: Counter[str] = Counter()

    def keep(self, salt: str, id_: str, messages: list[Json]) -> None:
        """Keeps the messages of a response, its own included."""
        size = len(json.dumps(messages))
        self._kept.setdefault(salt, OrderedDict())[id_] = messages, size
        self._characters[salt] += size
        while sum(map(self._part, self._kept)) > 1:
            most = max(self._kept, key=self._part)
            _, (_, size) = self._kept[most].popitem(last=False)
            self._characters[most] -= size
            if not self._kept[most]:
                del self._kept[most], self._characters[most]

    def of(self, salt: str, id_: str | None) -> list[Json]:
        """The messages of a response; none without an id. Raises `ApiError` 404."""
        if id_ is None:
            return []
        kept: dict[str, tuple[list[Json], int]] = self._kept.get(salt, {})
        if id_ not in kept:
            message = "previous_response_id: no such response is kept"
            code = "previous_response_not_found"
            raise ApiError(404, message, code=code, param="previous_response_id")
        self._kept[salt].move_to_end(id_)
        return kept[id_][0]

    def _part(self, salt: str) -> float:
        """Of what may be kept, how much is a tenant's."""
        return max(len(self._kept[salt]) / _MOST_KEPT, self._characters[salt] / _MOST_CHARACTERS)


class ResponsesFormat(ChatFormat):
    """A `response` and its events, made of a chat's."""

    id_prefix = "resp"
    named_events = True

    def __init__(
        self, request: ParsedRequest, engine: Engine, body: ResponsesRequest, key: str
    ) -> None:
        """`key`: the request's `prefix_key`, if there are replicas; the id ends with it."""
        super().__init__(request, engine)
        self.id += key and f"-{key}"
        self._body = body
        self._number = 0
        self._output: list[Json] = []
        self._text: Json | None = None  # the message that is open
        self._call: Json | None = None

    @property
    def message(self) -> Json:
        """Converts an answer to a chat message."""
        calls = [
            {"id": one["call_id"], "function": {k: one[k] for k in ("name", "arguments")}}
            for one in self._output
            if one["type"] == "function_call"
        ]
        message: Json = {"role": "assistant", "content": self._said("output_text")}
        if reasoning := self._said("reasoning_text"):
            message["reasoning_content"] = reasoning
        return message | ({"tool_calls": calls} if calls else {})

    def whole(self, generations: Sequence[Generation]) -> Json:
        chat = super().whole(generations)
        (choice,) = chat["choices"]
        self.events({"choices": [choice | {"delta": choice["message"]}]})
        return self._response(choice["finish_reason"], chat["usage"]) | {"ckv": chat["ckv"]}

    def events(self, chunk: Json) -> list[Json]:
        (choice,) = chunk["choices"]
        delta, found = choice["delta"], []
        if "role" in delta:
            for kind in ("response.created", "response.in_progress"):
                found.append(self._event(kind, response=self._response(None, None)))
        for kind, field in _FIELDS:
            if not (text := delta.get(field)):
                continue
            found += self._end_call()
            if self._text is None or self._text["content"][0]["type"] != kind:
                found += self._end_text()
                self._text = _text_item(kind)
                self._output.append(self._text)
                found.append(self._item("added", self._text | {"content": []}))
                found.append(self._part("response.content_part.added", part=_part(kind)))
            self._text["content"][0]["text"] += text
            found.append(self._part(f"response.{kind}.delta", delta=text, **_LOGPROBS[kind]))
        for call in delta.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if "id" in call:
                found += self._end_text() + self._end_call()
                self._call = _call_item(call) | {"arguments": ""}
                self._output.append(self._call)
                found.append(self._item("added", self._call | {"status": "in_progress"}))
            if arguments and self._call is not None:
                self._call["arguments"] += arguments
                found.append(self._arguments("delta", delta=arguments))
        if choice["finish_reason"] is not None:
            found += self._end_text() + self._end_call()
            self._reason, self._cost = choice["finish_reason"], chunk.get("ckv")
        return found

    def closing(self, generations: Sequence[Generation]) -> list[Json]:
        tokens = usage(self._request, generations)
        response = self._response(self._reason, tokens) | {"ckv": self._cost}
        return [self._event(f"response.{response['status']}", response=response)]

    def _said(self, kind: str) -> str:
        """All text of a kind."""
        parts = [part for one in self._output for part in one.get("content", ())]
        return "".join(part["text"] for part in parts if part["type"] == kind)

    def _end_text(self) -> list[Json]:
        if self._text is None:
            return []
        item, self._text = self._text, None
        item["status"] = "completed"
        (part,) = item["content"]
        kind = part["type"]
        return [
            self._part(f"response.{kind}.done", text=part["text"], **_LOGPROBS[kind]),
            self._part("response.content_part.done", part=part),
            self._item("done", item),
        ]

    def _end_call(self) -> list[Json]:
        if (item := self._call) is None:
            return []
        done = self._arguments("done", name=item["name"], arguments=item["arguments"])
        self._call = None
        return [done, self._item("done", item)]

    def _arguments(self, kind: str, **values: Any) -> Json:
        at, item = len(self._output) - 1, self._output[-1]["id"]
        kind = f"response.function_call_arguments.{kind}"
        return self._event(kind, item_id=item, output_index=at, **values)

    def _item(self, kind: str, item: Json) -> Json:
        at = len(self._output) - 1
        return self._event(f"response.output_item.{kind}", output_index=at, item=dict(item))

    def _part(self, kind: str, **values: Any) -> Json:
        item = self._output[-1]
        return self._event(
            kind, item_id=item["id"], output_index=len(self._output) - 1, content_index=0, **values
        )

    def _event(self, kind: str, **values: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _response(self, reason: str | None, usage: Json | None) -> Json:
        body, whole = self._body, reason in ("stop", "tool_calls")
        status = "in_progress" if reason is None else "completed" if whole else "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(self._request.arrived),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": self._output if reason else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "usage": usage and {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": len(self._tokenizer.encode(self._said("reasoning_text")))
                },
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip


def _part(kind: str) -> Json:
    more: Json = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": "", **more}


def _text_item(kind: str) -> Json:
    prefix, fields = _ITEMS[kind]
    id_ = f"{prefix}_{secrets.token_hex(12)}"
    return {"id": id_, **fields, "status": "in_progress", "content": [_part(kind)]}


def _call_item(call: Json) -> Json:
    return {
        "id": f"fc_{secrets.token_hex(12)}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        **call["function"],
    }


# -- Anthropic's messages --------------------------------------------------------------------------


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
        body: Json = {name: getattr(self, name) for name in _SAME_IN_MESSAGES}
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
        self._index = 0
        self._open: str | None = None  # type of the block that is open
        self._ended: str | None = None

    def whole(self, generations: Sequence[Generation]) -> Json:
        chat = super().whole(generations)
        (choice,) = chat["choices"]
        message = choice["message"]
        content: list[Json] = []
        if reasoning := message.get("reasoning_content"):
            content.append(_thinking(reasoning))
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError):  # cut short, or nested too deep
                arguments = {}
            block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            content.append(block | {"input": arguments})
        whole = self._message(content, chat["usage"])
        return whole | self._reason(choice["finish_reason"], generations) | {"ckv": chat["ckv"]}

    def events(self, chunk: Json) -> list[Json]:
        (choice,) = chunk["choices"]
        delta, found = choice["delta"], []
        if "role" in delta:
            found.append({"type": "message_start", "message": self._message([], None)})
        for kind, field in (("thinking", "reasoning_content"), ("text", "content")):
            if piece := delta.get(field):
                if self._open != kind:
                    block = _thinking("") if kind == "thinking" else {"type": kind, kind: ""}
                    found += [*self._block_stop(), self._block_start(block)]
                found.append(self._block_delta({"type": f"{kind}_delta", kind: piece}))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                found += self._block_stop()
                name = call["function"]["name"]
                block = {"type": "tool_use", "id": call["id"], "name": name, "input": {}}
                found.append(self._block_start(block))
            if partial := call["function"]["arguments"]:
                piece = {"type": "input_json_delta", "partial_json": partial}
                found.append(self._block_delta(piece))
        if choice["finish_reason"] is not None:
            found += self._block_stop()
            self._ended = choice["finish_reason"]
        return found

    def closing(self, generations: Sequence[Generation]) -> list[Json]:
        tokens = _usage(usage(self._request, generations))
        delta = self._reason(self._ended, generations)
        return [
            {"type": "message_delta", "delta": delta, "usage": tokens},
            {"type": "message_stop"},
        ]

    def _block_start(self, block: Json) -> Json:
        self._open = block["type"]
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _block_delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _block_stop(self) -> list[Json]:
        if self._open is None:
            return []
        self._open = None
        self._index += 1
        return [{"type": "content_block_stop", "index": self._index - 1}]

    def _reason(self, reason: str | None, generations: Sequence[Generation]) -> Json:
        """Why it ended, and by which of the request's texts."""
        stopped = generations[0].completion().stopped_by if reason == "stop" else None
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


def _thinking(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _usage(usage: Json) -> Json:
    """Tokens as Anthropic counts them: those from the store apart."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
