"""What clients send, field by field. Unknown fields are refused, and so are wishes not granted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ckv_jax.config import check_budget
from ckv_jax.model.sampling import MOST_LOGPROBS

_MOST_STOPS = 16
_MOST_PROMPTS = 256

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=3.2e9, allow_inf_nan=False)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Strict(BaseModel):
    """No field that is not here, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class CkvOptions(Strict):
    """What only this server has, under one name in the body."""

    budget: float | Annotated[str, Field(max_length=100)] | None = None
    """What of the stored prefix takes part in the answer: a share of it, 1: exact; or
    "mass:SHARE" or "mass:SHARE:LEAST-MOST", see `Request.budget`."""
    mass: Share | None = None
    """Share of the question's attention that has to be covered; a share as `budget` beside it is
    the most of the prefix that may be read for that."""
    retain_s: Seconds | None = None
    """Seconds after its last use for which what is stored of this prompt is wanted."""

    @field_validator("budget", mode="before")
    @classmethod
    def _a_budget(cls, value: Any) -> Any:
        return None if value is None else check_budget(value)

    @model_validator(mode="after")
    def _one_mass(self) -> CkvOptions:
        if self.mass is not None and isinstance(self.budget, str):
            raise ValueError("expected one of mass and a budget that is a text, not both")
        return self

    @property
    def asked(self) -> float | str | None:
        """Both as one, as `Request.budget`; None: nothing was said."""
        if self.mass is None:
            return self.budget
        mass = f"mass:{_plain(self.mass)}"
        return mass if self.budget is None else f"{mass}:0-{_plain(float(self.budget))}"


def _plain(share: float) -> str:
    """A number without an exponent."""
    return np.format_float_positional(share, trim="0")


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class TextPart(Strict):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    @property
    def text(self) -> str:
        """Its content in one piece."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TextFormat(Strict):
    """The one format of answers."""

    type: Literal["text"]


class Sampled(Strict):
    """What both ways of asking have in common. Fields that would change an answer in a way that is
    not built here may stand at the value that changes nothing."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = None
    ckv: CkvOptions = CkvOptions()

    @field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _as_int(cls, value: Any) -> Any:
        return 0 if isinstance(value, float) and value == 0 else value

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def told_usage(self) -> bool:
        """Whether a stream ends with what it used."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None

    @property
    def texts(self) -> int:
        """Texts asked for."""
        return self.n or 1

    @property
    def new_tokens(self) -> int | None:
        """Tokens of the answer at most, by either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def told_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampled):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=_MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)

    @property
    def texts(self) -> int:
        """Texts asked for."""
        return (self.n or 1) * len(self.prompts)

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer at most: 16 where nothing is said, as OpenAI has it."""
        return self.max_tokens or 16

    @property
    def told_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return self.logprobs
