"""Request bodies of the HTTP API: their fields, validation, and conversion to engine requests.

Unsupported fields are ignored if they change no answer, and refused otherwise.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from ckv_jax.engine import Engine
from ckv_jax.fidelity import NotCalibrated, SettledBudget, Target, fidelity_of, target_of
from ckv_jax.model.grammar import Grammar, GrammarKind
from ckv_jax.model.sampling import MOST_LOGPROBS, SamplingParams
from ckv_jax.request import Request
from ckv_jax.server.config import MOST_GENERATIONS, SPARSE, ServerConfig
from ckv_jax.server.http import ApiError, client_errors, invalid
from ckv_jax.server.messages import (
    AnswerFormat,
    CallStyle,
    Choices,
    Message,
    Messages,
    NamedTool,
    StructuredOutputs,
    Tolerant,
    Tool,
    ToolChoice,
    Tools,
    check_template_kwargs,
    compiled,
    effort,
    wanted,
)
from ckv_jax.server.tenants import Tenant
from ckv_jax.storage.errors import FingerprintMismatch, PrefixNotFound
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.tools.inspect import find_prefix

_MOST_STOPS = 16
_MOST_PROMPTS = 256
_MOST_DOCUMENTS = 64

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
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
    mass: Share | None = None
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
            if value is not None and value not in neutral:
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
        outputs = self.structured_outputs or StructuredOutputs()
        anything = {"type": "object"}
        return wanted(
            [
                (
                    "response_format",
                    "json_schema",
                    anything if form.type == "json_object" else None,
                ),
                (
                    "response_format.json_schema.schema",
                    "json_schema",
                    form.json_schema.schema_
                    if form.type == "json_schema" and form.json_schema
                    else None,
                ),
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
        )

    @property
    def compiles(self) -> bool:
        """Whether the request needs a grammar to be compiled. Raises `ApiError`."""
        return self.grammar is not None

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

    @property
    def compiles(self) -> bool:
        return self.has_to_call or super().compiles

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return value and check_template_kwargs(value)

    @property
    def num_generations(self) -> int:
        """Generations requested."""
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
        """Generations requested."""
        return (self.n or 1) * len(self.prompts)

    @property
    def new_tokens(self) -> int:
        """The most tokens of a generation; 16 by default, as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return self.logprobs


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


# -- parsing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as token ids."""

    tokens: np.ndarray
    """int32 [T]."""
    prefix: Prefix
    """The stored part of it on arrival, without its last token."""
    budget: float | str
    """Budget, see `Request.budget`; 1 until a requested fidelity is settled."""
    settled: SettledBudget | None = None
    """The settled budget and its cost; None without a fidelity."""
    text: str = ""
    """Text of the prompt; empty for token ids and chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One API request in the engine's terms."""

    tenant: Tenant
    model: str
    """The name that the client asked for."""
    prompts: list[Prompt]
    choices: int
    """Generations for each prompt."""
    sampling: list[SamplingParams]
    """One for each generation, prompt by prompt."""
    budget: float | str
    """The requested budget or fidelity; each prompt has its settled budget."""
    target: Target | None
    """The target of a requested fidelity; None without one."""
    retain_s: float | None
    request_s: float
    usage: StreamOptions
    """Options of the usage in a stream."""
    echo: bool = False
    """Whether answers begin with their prompts."""
    documents: tuple[Prefix, ...] = ()
    """Stored prefixes that are read before each prompt."""
    waited_ms: float = 0.0
    """Milliseconds of waiting for requests that computed or wrote the same prefix."""
    silent: bool = False
    """Whether nothing is generated: the one token that is computed is not shown."""
    citations: int = 0
    """Passages wanted of each generation."""
    calls: CallStyle | None = None
    """Format of tool calls in answers; None: no calls."""
    cited: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Citations found, by index of the generation."""
    arrived: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def budgets(self) -> str:
        """Formats the budgets of all prompts, or the common one."""
        return ", ".join(dict.fromkeys(str(prompt.budget) for prompt in self.prompts))

    @property
    def num_generations(self) -> int:
        """Generations of all prompts."""
        return len(self.sampling)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each with the documents before it."""
        return sum(self.document_tokens + len(prompt.tokens) for prompt in self.prompts)

    @property
    def document_tokens(self) -> int:
        """Tokens of the documents before each prompt."""
        return sum(document.num_tokens for document in self.documents)

    def engine_requests(self) -> list[Request]:
        """One request for each generation."""
        return [
            Request(
                prefix=None if self.documents else prompt.prefix,
                documents=self.documents or None,
                suffix=prompt.tokens[prompt.prefix.num_tokens :].tolist(),
                budget=prompt.budget,
                deadline_s=self.request_s,
                salt=self.tenant.salt,
            )
            for prompt in self.prompts
            for _ in range(self.choices)
        ]


class RequestParser:
    """Parses bodies for one engine. Thread-safe; tokenizing a long prompt takes its time."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config

    @property
    def models(self) -> list[str]:
        """The names that this server answers to."""
        return [self._config.model, f"{self._config.model}{SPARSE}"]

    def check_model(self, name: str) -> None:
        """Raises `ApiError` 404 for a name that is none of `models`."""
        if name not in self.models:
            message = f"got another model, expected {' or '.join(self.models)}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def check(self, body: ChatRequest | CompletionRequest) -> None:
        """Raises `ApiError` for another model, and for more generations than `MOST_GENERATIONS`."""
        self.check_model(body.model)
        if body.num_generations > MOST_GENERATIONS:
            raise invalid(f"n: expected prompts times n at most {MOST_GENERATIONS}", param="n")

    def parse(self, body: ChatRequest | CompletionRequest, tenant: Tenant) -> ParsedRequest:
        """Converts a body to engine requests. Raises `ApiError` and `CkvError`."""
        limit = self._engine.model_config.max_position_embeddings
        documents = tuple(self.document(name, tenant) for name in body.ckv.documents or ())
        if documents and body.echo:
            raise invalid("echo: expected false, or no documents", param="echo")
        if isinstance(body, ChatRequest):
            field, texts = "messages", [""]
            prompts = [self.chat_tokens(body, documents)]
        else:
            field, texts = "prompt", [t if isinstance(t, str) else "" for t in body.prompts]
            prompts = [self.encode(prompt, field, begins=not documents) for prompt in body.prompts]
        before = sum(document.num_tokens for document in documents)
        usual = min(self._config.max_tokens, max(1, limit - before - len(prompts[0])))
        new_tokens = usual if body.new_tokens is None else body.new_tokens
        for tokens in prompts:
            if before + len(tokens) + max(1, new_tokens) > limit:
                raise invalid(
                    f"{field}: got {before + len(tokens)} tokens, expected at most {limit} with "
                    "the new ones (the model's context)",
                    param=field,
                    code="context_length_exceeded",
                )
        choices = body.n or 1
        grammar, calls = self.grammar(body)
        seed = secrets.randbits(32) if body.seed is None else body.seed
        given = {
            name: value
            for name in ("temperature", "top_p")
            if (value := getattr(body, name)) is not None
        }
        if body.top_k is not None:
            given["top_k"] = max(0, body.top_k)  # -1 and 0: all of them
        if (body.min_tokens or 0) > new_tokens:
            raise invalid("min_tokens: expected at most max_tokens", param="min_tokens")
        with client_errors("stop"):
            sampling = dataclasses.replace(
                self._engine.default_sampling,
                max_tokens=max(1, new_tokens),
                min_tokens=body.min_tokens or 0,
                ignore_eos=bool(body.ignore_eos),
                stop=body.stops,
                stop_token_ids=tuple(body.stop_token_ids or ()),
                logprobs=body.num_logprobs,
                grammar=grammar,
                **given,
            )
        sparse = body.model.endswith(SPARSE)
        usual_budget = self._config.sparse_budget if sparse else self._config.budget
        budget = usual_budget if (requested := body.ckv.as_budget) is None else requested
        target, fidelity = None, fidelity_of(budget)
        if fidelity is not None and documents:
            if requested is not None:
                raise invalid("ckv.fidelity: expected no documents", param="ckv.fidelity")
            budget, fidelity = 1.0, None  # the server's own follows questions over one prefix
        if fidelity is not None:
            try:
                target = target_of(self._engine, fidelity)
            except NotCalibrated as error:
                message = "ckv.fidelity: this server has no calibration; run `ckv calibrate` on it"
                raise invalid(message, param="ckv.fidelity", code="unsupported_value") from error
        return ParsedRequest(
            tenant=tenant,
            model=body.model,
            prompts=[
                Prompt(
                    tokens=tokens,
                    prefix=self.stored(tokens[:-1] if not documents else tokens[:0], tenant.salt),
                    text=text,
                    budget=budget if target is None else 1.0,
                )
                for tokens, text in zip(prompts, texts, strict=True)
            ],
            choices=choices,
            sampling=[
                dataclasses.replace(sampling, seed=(seed + choice) % 2**32)
                for _ in prompts
                for choice in range(choices)
            ],
            budget=budget,
            target=target,
            retain_s=body.ckv.retain_s,
            request_s=self._config.request_s,
            usage=body.stream_options or StreamOptions(),
            echo=bool(body.echo),
            documents=documents,
            silent=new_tokens == 0,
            citations=body.ckv.citations,
            calls=calls,
        )

    def grammar(
        self, body: ChatRequest | CompletionRequest
    ) -> tuple[Grammar | None, CallStyle | None]:
        """Compiles the grammar of answers and the format of tool calls. Raises `ApiError`."""
        found, engine = body.grammar, self._engine
        tools = body.callable_tools if isinstance(body, ChatRequest) else []
        if not tools or not isinstance(body, ChatRequest):
            return None if found is None else compiled(engine, *found), None
        if found is not None:
            message = f"{found[0]}: expected either tools or an answer format, not both"
            raise invalid(message, param=found[0], code="unsupported_value")
        assert engine.tokenizer is not None
        style = CallStyle.of(engine.tokenizer)
        if body.has_to_call:
            parallel = body.parallel_tool_calls is not False and body.tool_choice == "required"
            text = style.grammar(tools, engine.tokenizer, parallel=parallel)
            return compiled(engine, "tools", "lark", text), style
        if not style.renders:
            message = "tools: expected tool_choice 'required' or a function with this chat template"
            raise invalid(message, param="tools", code="unsupported_value")
        return None, style

    def document(self, name: str, tenant: Tenant) -> Prefix:
        """A stored prefix of a tenant's by its id, the start of that, or its name.

        Raises `ApiError` 404 where there is none, 400 where several have the name, or
        another model or system stored it.
        """
        try:
            prefix = find_prefix(self._engine.store, name, salt=tenant.salt)
        except PrefixNotFound as error:
            message = "ckv.documents: no such prefix is stored"
            if error.several:
                message = "ckv.documents: several ids begin like this; give a whole id"
            raise ApiError(404, message, code="prefix_not_found", param="ckv.documents") from error
        except ValueError as error:
            message = "ckv.documents: several prefixes have this name; give the id of one"
            raise invalid(message, param="ckv.documents") from error
        try:
            self._engine.check_prefix(prefix, salt=tenant.salt)
        except (ValueError, FingerprintMismatch) as error:
            message = "ckv.documents: this prefix was stored by another model or system"
            raise invalid(message, param="ckv.documents") from error
        return prefix

    def chat_tokens(self, body: ChatRequest, documents: Sequence[Prefix]) -> np.ndarray:
        """int32 [T]: a chat in the model's own template, up to the start of its answer.

        After a document that stands in the template, a question that continues it.
        """
        engine = self._engine
        assert engine.tokenizer is not None
        if documents and engine.is_document(documents[-1]):
            (first, *others) = body.messages
            if others or first.role != "user":
                message = "messages: expected exactly one user message after a document"
                raise invalid(message, param="messages")
            self.check_fits(first.text, "messages")
            with client_errors("messages"):
                return engine.question(documents[-1], first.text)
        template = {
            **effort(engine.tokenizer, body.reasoning_effort),
            **(body.chat_template_kwargs or {}),
        }
        if body.tools and body.tool_choice != "none":
            template["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
        tokens = self.messages_tokens(body.messages, **template)
        return engine.tokenizer.without_front(tokens) if documents else tokens

    def messages_tokens(self, messages: list[Message], **template: Any) -> np.ndarray:
        """The same of messages; `template`: its variables, beside the server's own."""
        rendered = [message.rendered() for message in messages]
        texts = [text for value in (rendered, template) for text in _strings(value)]
        self.check_fits("\n".join(texts), "messages")
        values = {**self._config.chat_template_kwargs, **template}
        with client_errors("messages"):
            return self._engine.chat(rendered, **values)

    def encode(self, text: str | list[int], field: str, *, begins: bool = True) -> np.ndarray:
        """int32 [T]: the tokens of a prompt or a prefix, from a field. Raises `ApiError`.

        `begins`: whether nothing comes before them.
        """
        self.check_fits(text, field)
        expected = "Unicode text" if isinstance(text, str) else "token ids of this model"
        with client_errors(field, expected):
            tokens = self._engine.encode(text, begins=begins)
        if not len(tokens):
            raise invalid(f"{field}: expected at least one token", param=field)
        return tokens

    def check_fits(self, text: str | list[int], field: str) -> None:
        """Refuses what cannot fit the model's context before it is encoded. Raises `ApiError`."""
        tokenizer, limit = self._engine.tokenizer, self._engine.model_config.max_position_embeddings
        assert tokenizer is not None
        if tokenizer.exceeds(text, limit) if isinstance(text, str) else len(text) > limit:
            raise invalid(
                f"{field}: got too many tokens, expected at most {limit} (the model's context)",
                param=field,
                code="context_length_exceeded",
            )

    def stored(self, tokens: np.ndarray, salt: str) -> Prefix:
        """The longest prefix of `tokens` int32 [T] that the tenant of a salt has stored."""
        engine = self._engine
        return engine.store.longest_prefix(
            tokens, fingerprint=engine.fingerprint, layout=engine.layout, salt=salt
        )
