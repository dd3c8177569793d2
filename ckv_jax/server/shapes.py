"""The JSON of answers: chat or plain, whole or piece by piece, with what they cost."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from ckv_jax.model.detokenizer import LAST_TOKENS
from ckv_jax.model.sampling import Logprobs
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.request import Generation
from ckv_jax.server.asked import Asked, Prompt

_FINISH = {"stop": "stop", "length": "length", "cancelled": "length", "deadline": "length"}


class Shape(Protocol):
    """How the answers of one endpoint look."""

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first piece of a stream, before any text."""
        ...

    def piece(self, choice: int, text: str, found: Sequence[Found]) -> dict[str, Any]:
        """More text of one choice."""
        ...

    def end(self, choice: int, generation: Generation) -> dict[str, Any]:
        """One choice is over."""
        ...

    def usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The last piece, where it was asked for."""
        ...

    def whole(
        self, generations: Sequence[Generation], found: Sequence[Sequence[Found]]
    ) -> dict[str, Any]:
        """Everything at once."""
        ...


Found = tuple[int, Logprobs]
"""A token and what is told of it."""


class _Common:
    """What the shapes share. Args: kind and chunk_kind are the names of the JSON objects."""

    def __init__(
        self, asked: Asked, tokenizer: Tokenizer, *, prefix: str, kind: str, chunk_kind: str
    ) -> None:
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self._asked = asked
        self._tokenizer = tokenizer
        self._kind = kind
        self._chunk_kind = chunk_kind
        self._latest = [
            prompt.tokens[-LAST_TOKENS:].tolist()
            for prompt in asked.prompts
            for _ in range(asked.choices)
        ]

    def usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        return self._object(self._chunk_kind, [], usage=usage(self._asked, generations))

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(self._asked.arrived),
            "model": self._asked.model,
            "choices": choices,
            **more,
        }

    def _tokens(
        self, choice: int, found: Sequence[Found]
    ) -> list[tuple[str, float, list[tuple[str, float]]]]:
        """Of each token its text after the tokens before it, its logprob, and the likeliest."""
        rows = []
        for token, told in found:
            before = self._latest[choice]
            rows.append(
                (
                    self._tokenizer.decode_next(token, after=before),
                    told.token,
                    [
                        (self._tokenizer.decode_next(other, after=before), value)
                        for other, value in told.top
                    ],
                )
            )
            self._latest[choice] = [*before, token][-LAST_TOKENS:]
        return rows


class ChatShape(_Common):
    """`chat.completion` and its chunks."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer) -> None:
        super().__init__(
            asked,
            tokenizer,
            prefix="chatcmpl",
            kind="chat.completion",
            chunk_kind="chat.completion.chunk",
        )

    def opening(self, choice: int) -> dict[str, Any] | None:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def piece(self, choice: int, text: str, found: Sequence[Found]) -> dict[str, Any]:
        return self._delta(choice, {"content": text}, found)

    def end(self, choice: int, generation: Generation) -> dict[str, Any]:
        return self._delta(choice, {}, reason=generation.finish_reason) | {
            "ckv": cost(self._asked, choice, generation)
        }

    def whole(
        self, generations: Sequence[Generation], found: Sequence[Sequence[Found]]
    ) -> dict[str, Any]:
        choices = [
            {
                "index": choice,
                "message": {"role": "assistant", "content": generation.text, "refusal": None},
                "logprobs": self._logprobs(choice, told),
                "finish_reason": _FINISH[generation.finish_reason],
            }
            for choice, (generation, told) in enumerate(zip(generations, found, strict=True))
        ]
        return self._object(self._kind, choices, **totals(self._asked, generations))

    def _delta(
        self,
        choice: int,
        delta: dict[str, Any],
        found: Sequence[Found] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        return self._object(
            self._chunk_kind,
            [
                {
                    "index": choice,
                    "delta": delta,
                    "logprobs": self._logprobs(choice, found),
                    "finish_reason": None if reason is None else _FINISH[reason],
                }
            ],
        )

    def _logprobs(self, choice: int, found: Sequence[Found]) -> dict[str, Any] | None:
        if not found:
            return None
        return {
            "content": [
                _one(text, value) | {"top_logprobs": [_one(*other) for other in top]}
                for text, value, top in self._tokens(choice, found)
            ],
            "refusal": None,
        }


def _one(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


class CompletionShape(_Common):
    """`text_completion`, whose pieces are objects of the same kind."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer) -> None:
        super().__init__(
            asked, tokenizer, prefix="cmpl", kind="text_completion", chunk_kind="text_completion"
        )
        self._offsets = [0] * asked.texts

    def opening(self, choice: int) -> dict[str, Any] | None:
        return None

    def piece(self, choice: int, text: str, found: Sequence[Found]) -> dict[str, Any]:
        return self._object(self._chunk_kind, [self._choice(choice, text, found)])

    def end(self, choice: int, generation: Generation) -> dict[str, Any]:
        last = self._choice(choice, "", (), generation.finish_reason)
        return self._object(self._chunk_kind, [last], ckv=cost(self._asked, choice, generation))

    def whole(
        self, generations: Sequence[Generation], found: Sequence[Sequence[Found]]
    ) -> dict[str, Any]:
        choices = [
            self._choice(choice, generation.text, told, generation.finish_reason)
            for choice, (generation, told) in enumerate(zip(generations, found, strict=True))
        ]
        return self._object(self._kind, choices, **totals(self._asked, generations))

    def _choice(
        self, choice: int, text: str, found: Sequence[Found], reason: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": choice,
            "text": text,
            "logprobs": self._logprobs(choice, found),
            "finish_reason": None if reason is None else _FINISH[reason],
        }

    def _logprobs(self, choice: int, found: Sequence[Found]) -> dict[str, Any] | None:
        if not found:
            return None
        rows = self._tokens(choice, found)
        offsets = []
        for text, _, _ in rows:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(text)
        return {
            "tokens": [text for text, _, _ in rows],
            "token_logprobs": [value for _, value, _ in rows],
            "top_logprobs": [dict(top) for _, _, top in rows],
            "text_offset": offsets,
        }


def usage(asked: Asked, generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens, as OpenAI counts them: each prompt once, whatever comes of it."""
    prompt = sum(len(prompt.tokens) for prompt in asked.prompts)
    completion = sum(len(generation.token_ids) for generation in generations)
    cached = sum(
        cached_tokens(prompt, generations[i * asked.choices])
        for i, prompt in enumerate(asked.prompts)
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def cached_tokens(prompt: Prompt, generation: Generation | None) -> int:
    """Prompt tokens whose KV was stored when they came, and still when they were needed, as far
    as its first text says; None: that did not end."""
    stored = prompt.prefix.num_tokens
    return stored if generation is None else min(stored, generation.completion().prefix.num_tokens)


def totals(asked: Asked, generations: Sequence[Generation]) -> dict[str, Any]:
    """Usage, and what only this server tells, of a whole answer."""
    return {
        "usage": usage(asked, generations),
        "ckv": cost(asked, 0, generations[0]),
    }


def cost(asked: Asked, choice: int, generation: Generation) -> dict[str, Any]:
    """What one text stood on and cost. Bytes and chunks are those of its own prefix: what others
    in its batch read is nobody else's business.

    `attention_covered`: share of the probe's attention on the chunks that took part; 1 where
    nothing was left out.
    """
    trace = generation.trace
    answer = generation.completion()
    return {
        "budget": asked.budget,
        "attention_covered": trace.attention_mass,
        "prefix_tokens": answer.prefix.num_tokens,
        "ssd_bytes": trace.of(answer.prefix.id, "ssd"),
        "chunks_recomputed": trace.of(answer.prefix.id, "recomputed_chunks"),
        "ttft_ms": trace.ttft_ms,
        "queued_ms": generation.queued_ms,
        "ended_by": answer.finish_reason,
    }
