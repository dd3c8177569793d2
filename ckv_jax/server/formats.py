"""The JSON of answers: chats or completions, whole or streamed, with their usage and cost."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ckv_jax.answer import LOW_COVERAGE
from ckv_jax.model.detokenizer import LAST_TOKENS
from ckv_jax.model.sampling import Logprobs
from ckv_jax.model.tokenizer import Tokenizer
from ckv_jax.request import Generation
from ckv_jax.server.schema import ParsedRequest, Prompt

_FINISH = {"stop": "stop", "length": "length", "cancelled": "length", "deadline": "length"}

TokenLogprobs = tuple[int, Logprobs]
"""A token id and its log probabilities."""


class ResponseFormat:
    """How the answers of one endpoint look; keeps the state of one answer."""

    id_prefix: str
    kind: str
    """`object` of a whole answer."""
    chunk_kind: str
    """`object` of a piece of a stream."""

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._request = request
        self._tokenizer = tokenizer
        self._latest = [
            prompt.tokens[-LAST_TOKENS:].tolist()
            for prompt in request.prompts
            for _ in range(request.choices)
        ]

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first piece of a choice in a stream, before any text; None if there is none."""
        return None

    def piece(self, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next piece of a choice in a stream."""
        raise NotImplementedError

    def end(self, choice: int, generation: Generation) -> dict[str, Any]:
        """The last piece of a choice in a stream."""
        raise NotImplementedError

    def usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The last piece of a stream, if the client asked for its usage."""
        return self._object(self.chunk_kind, [], usage=usage(self._request, generations))

    def whole(
        self, generations: Sequence[Generation], logprobs: Sequence[Sequence[TokenLogprobs]]
    ) -> dict[str, Any]:
        """The whole answer as one object."""
        choices = [
            self._whole_choice(choice, generation, found)
            for choice, (generation, found) in enumerate(zip(generations, logprobs, strict=True))
        ]
        return self._object(
            self.kind,
            choices,
            usage=usage(self._request, generations),
            ckv=cost(self._request, 0, generations[0]),
        )

    def _whole_choice(
        self, choice: int, generation: Generation, logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        raise NotImplementedError

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(self._request.arrived),
            "model": self._request.model,
            "choices": choices,
            **more,
        }

    def _rows(
        self, choice: int, logprobs: Sequence[TokenLogprobs]
    ) -> list[tuple[str, float, list[tuple[str, float]]]]:
        """For each token its string after the tokens before it, its log probability, and the
        strings and log probabilities of the likeliest."""
        rows = []
        for token, found in logprobs:
            after = self._latest[choice]
            top = [
                (self._tokenizer.decode_next(other, after=after), value)
                for other, value in found.top
            ]
            rows.append((self._tokenizer.decode_next(token, after=after), found.token, top))
            self._latest[choice] = [*after, token][-LAST_TOKENS:]
        return rows


class ChatFormat(ResponseFormat):
    """`chat.completion` and its chunks."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, choice: int) -> dict[str, Any] | None:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def piece(self, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._delta(choice, {"content": text}, logprobs)

    def end(self, choice: int, generation: Generation) -> dict[str, Any]:
        return self._delta(choice, {}, reason=generation.finish_reason) | {
            "ckv": cost(self._request, choice, generation)
        }

    def _whole_choice(
        self, choice: int, generation: Generation, logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        return {
            "index": choice,
            "message": {"role": "assistant", "content": generation.text, "refusal": None},
            "logprobs": self._logprobs(choice, logprobs),
            "finish_reason": _FINISH[generation.finish_reason],
        }

    def _delta(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprobs] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        return self._object(
            self.chunk_kind,
            [
                {
                    "index": choice,
                    "delta": delta,
                    "logprobs": self._logprobs(choice, logprobs),
                    "finish_reason": None if reason is None else _FINISH[reason],
                }
            ],
        )

    def _logprobs(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        return {
            "content": [
                _logprob(text, value) | {"top_logprobs": [_logprob(*other) for other in top]}
                for text, value, top in self._rows(choice, logprobs)
            ],
            "refusal": None,
        }


def _logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


class CompletionFormat(ResponseFormat):
    """`text_completion`, whose pieces are objects of the same kind."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        super().__init__(request, tokenizer)
        self._offsets = [0] * request.num_generations

    def piece(self, choice: int, text: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._object(self.chunk_kind, [self._choice(choice, text, logprobs)])

    def end(self, choice: int, generation: Generation) -> dict[str, Any]:
        last = self._choice(choice, "", (), generation.finish_reason)
        return self._object(self.chunk_kind, [last], ckv=cost(self._request, choice, generation))

    def _whole_choice(
        self, choice: int, generation: Generation, logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        return self._choice(choice, generation.text, logprobs, generation.finish_reason)

    def _choice(
        self, choice: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": choice,
            "text": text,
            "logprobs": self._logprobs(choice, logprobs),
            "finish_reason": None if reason is None else _FINISH[reason],
        }

    def _logprobs(self, choice: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        rows = self._rows(choice, logprobs)
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


def usage(request: ParsedRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens as OpenAI counts them: each prompt once, however many its generations."""
    prompt = request.prompt_tokens
    completion = sum(len(generation.token_ids) for generation in generations)
    cached = sum(
        cached_tokens(prompt, generations[i * request.choices])
        for i, prompt in enumerate(request.prompts)
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def cached_tokens(prompt: Prompt, generation: Generation | None) -> int:
    """Prompt tokens whose KV came from the store; an upper bound without a `generation`, the
    prompt's first that ended."""
    stored = prompt.prefix.num_tokens
    return stored if generation is None else min(stored, generation.completion().prefix.num_tokens)


def cost(request: ParsedRequest, choice: int, generation: Generation) -> dict[str, Any]:
    """What one generation read and cost. Bytes and chunks are those of its own prefix: reads of
    other requests in the batch are not disclosed.

    `attention_covered`: share of the probe's attention on the selected chunks; 1 where all were
    selected.
    """
    trace = generation.trace
    answer = generation.completion()
    cited = {"citations": request.cited[choice]} if choice in request.cited else {}
    return {
        "budget": request.budget,
        "attention_covered": trace.attention_mass,
        "low_coverage": trace.attention_mass < LOW_COVERAGE,
        "prefix_tokens": answer.prefix.num_tokens,
        "ssd_bytes": trace.of(answer.prefix.id, "ssd"),
        "chunks_recomputed": trace.of(answer.prefix.id, "recomputed_chunks"),
        "ttft_ms": trace.ttft_ms,
        "queued_ms": generation.queued_ms,
        "ended_by": answer.finish_reason,
    } | cited
