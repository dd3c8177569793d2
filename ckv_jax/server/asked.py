"""From a request's body to what the engine is asked: tokens, what of them is stored, sampling."""

from __future__ import annotations

import dataclasses
import secrets
import time
from dataclasses import dataclass, field

import numpy as np

from ckv_jax.engine import Engine
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Request
from ckv_jax.server.config import SPARSE, ServerConfig
from ckv_jax.server.errors import ApiError, invalid, what_clients_sent
from ckv_jax.server.schema import ChatRequest, CompletionRequest, Message, Sampled
from ckv_jax.server.tenants import Tenant
from ckv_jax.storage.prefix import Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One text to go on from."""

    tokens: np.ndarray
    """int32 [T]."""
    prefix: Prefix
    """What of it, without its last token, was stored when it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One API request, ready for the engine."""

    tenant: Tenant
    model: str
    """The name it was asked for by."""
    prompts: list[Prompt]
    choices: int
    """Texts for each prompt."""
    sampling: list[SamplingParams]
    """One for each text, prompt by prompt."""
    budget: float | str
    """As `Request.budget`."""
    retain_s: float | None
    told_usage: bool
    request_s: float
    arrived: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @property
    def texts(self) -> int:
        """Texts in all."""
        return len(self.sampling)

    def requests(self) -> list[Request]:
        """One for each text."""
        return [
            Request(
                prefix=prompt.prefix,
                suffix=prompt.tokens[prompt.prefix.num_tokens :].tolist(),
                budget=self.budget,
                deadline_s=self.request_s,
                salt=self.tenant.salt,
            )
            for prompt in self.prompts
            for _ in range(self.choices)
        ]


class Asking:
    """Makes `Asked` of bodies, for one engine. Thread-safe; slow for long texts."""

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
            message = f"there is no model {name[:200]!r} here, but {', '.join(self.models)}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def chat(self, body: ChatRequest, tenant: Tenant) -> Asked:
        """Raises `ApiError` and `CkvError` for what cannot be served."""
        tokens = self.encode(self.chat_text(body.messages))
        limit = self._engine.model_config.max_position_embeddings
        usual = min(self._config.max_tokens, max(1, limit - len(tokens)))
        return self._asked(body, tenant, [tokens], body.new_tokens or usual, body.told_logprobs)

    def chat_text(self, messages: list[Message]) -> str:
        """Messages as the model's own template writes them, up to where its answer begins."""
        with what_clients_sent():
            return self._engine.chat([{"role": _role(m.role), "content": m.text} for m in messages])

    def encode(self, text: str | list[int]) -> np.ndarray:
        """int32 [T]: what a prompt or a prefix consists of. Raises `ApiError`."""
        with what_clients_sent():
            tokens = self._engine.encode(text, begins=True)
        if not len(tokens):
            raise invalid("got an empty text, expected at least one token")
        return tokens

    def completion(self, body: CompletionRequest, tenant: Tenant) -> Asked:
        """The same for prompts that are text or token ids."""
        tokens = [self.encode(prompt) for prompt in body.prompts]
        return self._asked(body, tenant, tokens, body.new_tokens, body.told_logprobs)

    def check(self, body: ChatRequest | CompletionRequest) -> None:
        """Raises `ApiError` for another model, and for more texts than one request may ask for."""
        self.check_model(body.model)
        most = self._config.max_choices
        if body.texts > most:
            raise invalid(f"got {body.texts} texts, expected at most {most}", param="n")

    def stored(self, tokens: np.ndarray, tenant: Tenant) -> Prefix:
        """The longest prefix of `tokens` int32 [T] that this tenant has stored."""
        engine = self._engine
        return engine.store.longest_prefix(
            tokens, fingerprint=engine.fingerprint, layout=engine.layout, salt=tenant.salt
        )

    def _asked(
        self,
        body: Sampled,
        tenant: Tenant,
        prompts: list[np.ndarray],
        new_tokens: int,
        logprobs: int | None,
    ) -> Asked:
        choices = body.n or 1
        limit = self._engine.model_config.max_position_embeddings
        for tokens in prompts:
            if len(tokens) + new_tokens > limit:
                raise invalid(
                    f"got a prompt of {len(tokens)} tokens and room for {new_tokens} new ones; "
                    f"this model's context has room for {limit} together",
                    param="messages" if isinstance(body, ChatRequest) else "prompt",
                    code="context_length_exceeded",
                )
        seed = secrets.randbits(32) if body.seed is None else body.seed
        said = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(body, name)) is not None
        }
        with what_clients_sent():
            sampling = dataclasses.replace(
                self._engine.default_sampling,
                max_tokens=new_tokens,
                stop=body.stops,
                logprobs=logprobs,
                **said,
            )
        return Asked(
            tenant=tenant,
            model=body.model,
            prompts=[
                Prompt(tokens=tokens, prefix=self.stored(tokens[:-1], tenant)) for tokens in prompts
            ],
            choices=choices,
            sampling=[
                dataclasses.replace(sampling, seed=(seed + choice) % 2**32)
                for _ in prompts
                for choice in range(choices)
            ],
            budget=self._budget(body),
            retain_s=body.ckv.retain_s,
            told_usage=body.told_usage,
            request_s=self._config.request_s,
        )

    def _budget(self, body: Sampled) -> float | str:
        if (asked := body.ckv.asked) is not None:
            return asked
        sparse = body.model.endswith(SPARSE)
        return self._config.sparse_budget if sparse else self._config.budget


def _role(role: str) -> str:
    """The role as chat templates know it."""
    return "system" if role == "developer" else role
