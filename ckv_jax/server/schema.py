"""Request bodies of the HTTP API: their fields and validation.

Unsupported fields are ignored if they change no answer, and refused otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from ckv_jax.config import check_budget
from ckv_jax.fidelity import fidelity_of
from ckv_jax.model.grammar import GrammarKind
from ckv_jax.model.sampling import MOST_LOGPROBS
from ckv_jax.server.http import invalid
from ckv_jax.server.messages import (
    AnswerFormat,
    Choices,
    Messages,
    NamedTool,
    StructuredOutputs,
    Tolerant,
    Tool,
    ToolChoice,
    Tools,
    check_template_kwargs,
)

_MOST_STOPS = 16
_MOST_PROMPTS = 256
_MOST_DOCUMENTS = 64

Seconds = Annotated[float, Field(ge=0, le=3.2e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Document = Annotated[str, Field(min_length=1, max_length=200)]
StopIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=_MOST_STOPS)]


class Strict(BaseModel):
    """A JSON object that refuses unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _token_ids(value: Any) -> list[int]:
    """Validates a list of token ids; stops at the first invalid one."""
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of token ids, at least one")
    if not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ValueError("expected token ids: integers of at least 0")
    return value


def _prompt(value: Any) -> Any:
    """Validates a text, token ids, or a list of either; the first item decides which."""
    if isinstance(value, str):
        return value
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str | list):
        if len(value) > _MOST_PROMPTS:
            raise ValueError(f"expected at most {_MOST_PROMPTS} prompts")
        if isinstance(first, list):
            return [_token_ids(tokens) for tokens in value]
        if not all(isinstance(text, str) for text in value):
            raise ValueError("expected only texts, or only token ids")
        return value
    if first is None:
        raise ValueError("expected a text, token ids, or a list of either")
    return _token_ids(value)


Tokens = Annotated[Any, BeforeValidator(_token_ids)]
"""Token ids."""


class CkvOptions(Strict):
    """Options that OpenAI's API does not have, under the name `ckv`."""

    budget: float | Annotated[str, Field(max_length=100)] | None = None
    """Share of the stored prefix to attend to (1: exact), or "mass:SHARE",
    "mass:SHARE:LEAST-MOST", see `Request.budget`; or "fidelity:SHARE", "auto", see `fidelity`."""
    fidelity: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Probability that the first token equals that of full attention, in place of a budget; needs
    one `ckv calibrate`."""
    mass: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Share of the question's attention to cover; `budget`, which is a share then, limits the part
    of the prefix that is read for it."""
    retain_s: Seconds | None = None
    """Time to live of the stored part of this prompt, in seconds after its last use."""
    documents: Annotated[list[Document], Field(min_length=1, max_length=_MOST_DOCUMENTS)] | None = (
        None
    )
    """Ids or names of stored prefixes that come before the prompt, in this order."""
    citations: Annotated[int, Field(ge=0, le=20)] = 0
    """Maximum number of citations: passages of the stored part of the prompt that the answer
    attended to most, see `Engine.citations`."""

    @field_validator("budget", mode="before")
    @classmethod
    def _a_budget(cls, value: Any) -> Any:
        try:
            if value is None or fidelity_of(value) is not None:
                return value
            return check_budget(value)
        except (ValueError, TypeError):
            message = "expected a share in (0, 1], mass:SHARE[:LEAST-MOST], fidelity:SHARE or auto"
            raise ValueError(message) from None

    @model_validator(mode="after")
    def _one_mass(self) -> CkvOptions:
        if self.mass is not None and isinstance(self.budget, str):
            raise ValueError("expected mass, or a budget that is a string, not both")
        if self.fidelity is not None and (self.mass is not None or self.budget is not None):
            raise ValueError("expected fidelity, or budget and mass, not both")
        return self

    @property
    def as_budget(self) -> float | str | None:
        """Returns `budget`, `mass` and `fidelity` as one budget of `Engine.ask`; None if none is
        given."""
        if self.fidelity is not None:
            return f"fidelity:{_plain(self.fidelity)}"
        if self.mass is None:
            return self.budget
        mass = f"mass:{_plain(self.mass)}"
        return mass if self.budget is None else f"{mass}:0-{_plain(float(self.budget))}"


def _plain(share: float) -> str:
    """Formats a number without an exponent."""
    return np.format_float_positional(share, trim="0")


class StreamOptions(Tolerant):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether each chunk of the stream has the usage so far."""
    include_obfuscation: Literal[False] = False


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "tools": ([],),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "store": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "no_repeat_ngram_size": (0,),
    "dry_multiplier": (0,),
}
"""Fields of other servers that would change an answer and are not supported, with their neutral
values; null is always neutral."""


class GenerationRequest(Tolerant):
    """Fields that chats and completions share; unknown fields are ignored."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    best_of: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    stop_token_ids: StopIds | None = None
    response_format: AnswerFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    ckv: CkvOptions = CkvOptions()

    @model_validator(mode="before")
    @classmethod
    def _built_here(cls, values: Any) -> Any:
        """Raises `ApiError` for a field with an unsupported value."""
        for name, neutral in _NEUTRAL.items():
            if name in cls.model_fields:
                continue
            value = values.get(name) if isinstance(values, dict) else None
            if value is None:
                continue
            flag = type(value) is bool  # True == 1
            if value not in [other for other in neutral if (type(other) is bool) == flag]:
                allowed = "".join(f"{json.dumps(other)}, " for other in neutral)
                message = f"{name}: expected {allowed}null or no such field; others are unsupported"
                raise invalid(message, param=name, code="unsupported_value")
        return values

    @model_validator(mode="after")
    def _one_of_each(self) -> GenerationRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of: expected the value of n, or no such field")
        return self

    @property
    def unknown(self) -> list[str]:
        """Names of fields that have no effect."""
        return [name[:64] for name in self.model_extra or () if name not in _NEUTRAL]

    @property
    def grammar(self) -> tuple[str, GrammarKind, Any] | None:
        """Returns (field, kind, value) of the grammar of answers; None: any text. Raises
        `ApiError`."""
        form = self.response_format or AnswerFormat(type="text")
        schema = form.json_schema if form.type == "json_schema" else None
        outputs = self.structured_outputs or StructuredOutputs()
        anything = {"type": "object"}
        any_object = anything if form.type == "json_object" else None
        given: list[tuple[str, GrammarKind, Any]] = [
            ("response_format", "json_schema", any_object),
            ("response_format.json_schema.schema", "json_schema", schema and schema.schema_),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("structured_outputs.json", "json_schema", outputs.json_),
            ("structured_outputs.regex", "regex", outputs.regex),
            ("structured_outputs.choice", "choice", outputs.choice),
            ("structured_outputs.grammar", "grammar", outputs.grammar),
            (
                "structured_outputs.json_object",
                "json_schema",
                anything if outputs.json_object else None,
            ),
        ]
        found = [one for one in given if one[2] is not None]
        if len(found) > 1:
            field = found[1][0]
            raise invalid(f"{field}: expected one answer format, not two", param=field)
        return found[0] if found else None

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a generation."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Field(max_length=20)] | None = None
    echo: Literal[False] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _tools_to_choose(self) -> ChatRequest:
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            if choice.function.name not in [tool.function.name for tool in self.tools or ()]:
                raise ValueError("tool_choice: expected the name of one of the tools")
        elif choice == "required" and not self.tools:
            raise ValueError("tool_choice: got 'required' without tools, expected at least one")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Returns the tools that an answer may call."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools or () if tool.function.name == name]
        return self.tools or []

    @property
    def has_to_call(self) -> bool:
        """Whether an answer must call a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return value and check_template_kwargs(value)

    @property
    def num_generations(self) -> int:
        return self.n or 1

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of a generation, by either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[Any, BeforeValidator(_prompt)]
    """Prompt or prompts: a text, token ids, or a list of either."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """All prompts, each a string or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @property
    def num_generations(self) -> int:
        return (self.n or 1) * len(self.prompts)

    @property
    def new_tokens(self) -> int:
        """The most tokens of a generation; 16 by default, as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs
