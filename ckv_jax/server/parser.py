"""Conversion of validated request bodies to requests of the engine."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckv_jax.engine import Engine
from ckv_jax.fidelity import FidelityTarget, NotCalibrated, SettledBudget, fidelity_of, target_of
from ckv_jax.model.grammar import Grammar
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Request
from ckv_jax.server.config import MOST_GENERATIONS, SPARSE, ServerConfig
from ckv_jax.server.http import ApiError, client_errors, invalid
from ckv_jax.server.messages import CallStyle, Message, compiled, effort
from ckv_jax.server.schema import ChatRequest, CompletionRequest, StreamOptions
from ckv_jax.server.tenants import Tenant
from ckv_jax.storage.errors import FingerprintMismatch, PrefixNotFound
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.tools.inspect import find_prefix


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
    target: FidelityTarget | None
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
