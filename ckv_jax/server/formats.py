"""JSON of answers: chats or completions, whole or streamed, with usage and cost."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckv_jax.answer import LOW_COVERAGE
from ckv_jax.engine import Engine
from ckv_jax.fidelity import fidelity_of
from ckv_jax.model.sampling import Logprobs
from ckv_jax.model.tokenizer import LAST_TOKENS
from ckv_jax.request import Generation
from ckv_jax.server.messages import CallParser, Reasoning, joined, reasons
from ckv_jax.server.parser import ParsedRequest

_FINISH = {"stop": "stop", "length": "length", "cancelled": "length", "deadline": "length"}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, or one that might have come in its place, with its log probability."""

    id: int
    text: str
    """Text that the token adds; "bytes:\\x…" for part of a character."""
    bytes: bytes
    value: float | None
    """None: the first token of a prompt, which follows nothing."""
    top: tuple[TokenLogprob, ...] = ()


class ResponseFormat:
    """Format of one endpoint's answers, with the state of one answer."""

    id_prefix: str
    kind: str
    """`object` of a whole answer."""
    chunk_kind: str
    """`object` of a piece of a stream."""
    named_events = False
    """Whether events of a stream have names, and none says that it is over."""

    def __init__(self, request: ParsedRequest, engine: Engine) -> None:
        assert engine.tokenizer is not None
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._request = request
        self._tokenizer = engine.tokenizer
        self._silent_ids = frozenset(engine.model_config.eos_token_ids)
        self._latest = [
            prompt.tokens[-LAST_TOKENS:].tolist()
            for prompt in request.prompts
            for _ in range(request.choices)
        ]
        count = request.num_generations
        self._tokens = [0] * count
        self._rows: list[deque[tuple[int, int, TokenLogprob]]] = [deque() for _ in range(count)]
        self._row_bytes = [0] * count
        self._text_bytes = [0] * count

    def opening(self, choice: int) -> dict[str, Any] | None:
        """The first piece of a choice in a stream, before any text; None if there is none."""
        return None

    def token(self, choice: int, token: int, found: Logprobs | None) -> None:
        """Takes in one token of a choice, before the text that it leads to."""
        self._tokens[choice] += 1
        if found is None:
            return
        after = self._latest[choice]
        row = self._row(token, after, found.token, found.top)
        self._latest[choice] = [*after, token][-LAST_TOKENS:]
        start = self._row_bytes[choice]
        width = 0 if token in self._silent_ids else len(row.bytes)
        self._row_bytes[choice] += width
        self._rows[choice].append((start, start + width, row))

    def piece(
        self, choice: int, text: str, ended: Generation | None = None
    ) -> dict[str, Any] | None:
        """The next piece of a choice in a stream, the last one where it has `ended`; None where
        there is nothing to say yet."""
        rows = self._covered(choice, text, ended)
        return self._piece(choice, text, rows) if text or rows else None

    def end(self, choice: int, generation: Generation) -> list[dict[str, Any]]:
        """The last pieces of a choice in a stream."""
        raise NotImplementedError

    def events(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream that one piece becomes."""
        return [chunk]

    def closing(self, generations: Sequence[Generation]) -> list[dict[str, Any]]:
        """The last events of a stream, of all generations."""
        if not self._request.usage.include_usage:
            return []
        return [self._object(self.chunk_kind, [], usage=usage(self._request, generations))]

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The whole answer as one object."""
        choices = []
        for choice, generation in enumerate(generations):
            rows = self._covered(choice, generation.text, generation)
            whole = self._whole_choice(choice, generation, rows)
            if len(generations) > 1 and choice in self._request.cited:
                whole["ckv"] = {"citations": self._request.cited[choice]}
            choices.append(whole)
        return self._object(
            self.kind,
            choices,
            usage=usage(self._request, generations),
            ckv=cost(self._request, 0, generations[0]),
        )

    def _piece(self, choice: int, text: str, rows: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _whole_choice(
        self, choice: int, generation: Generation, rows: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        """One piece of a stream, with the usage so far if the client asked for that."""
        if self._request.usage.continuous_usage_stats:
            prompt, tokens = self._request.prompt_tokens, sum(self._tokens)
            if self._request.silent:
                tokens = 0
            more["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": tokens,
                "total_tokens": prompt + tokens,
            }
        return self._object(self.chunk_kind, [choice], **more)

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(self._request.arrived),
            "model": self._request.model,
            "choices": choices,
            **more,
        }

    def _covered(self, choice: int, text: str, ended: Generation | None) -> list[TokenLogprob]:
        """Rows of tokens that come with `text`, the next of a choice: all so far, or, where a stop
        string may cut them off, those that begin within the text so far."""
        certain = ended is not None and ended.completion().finish_reason != "stop"
        if certain or not self._request.sampling[choice].stop:
            found = [row for _, _, row in self._rows[choice]]
            self._rows[choice].clear()
            return found
        self._text_bytes[choice] += len(text.encode("utf-8", "surrogatepass"))
        end, rows = self._text_bytes[choice], self._rows[choice]
        found = []
        while rows and (rows[0][0] < end or rows[0][1] <= end):
            found.append(rows.popleft()[2])
        return found

    def _row(
        self, token: int, after: Sequence[int], value: float | None,
        top: Sequence[tuple[int, float]],
    ) -> TokenLogprob:  # fmt: skip
        def one(id_: int, value: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
            text = self._tokenizer.decode_next(id_, after=after)
            data = self._tokenizer.decode_bytes(id_, text)
            if data != text.encode("utf-8", "surrogatepass"):
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            return TokenLogprob(id_, text, data, value, top)

        return one(token, value, tuple(one(*other) for other in top))


class ChatFormat(ResponseFormat):
    """`chat.completion` and its chunks."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request: ParsedRequest, engine: Engine) -> None:
        super().__init__(request, engine)
        self._reasoning: list[Reasoning] | None = None
        if reasons(self._tokenizer):
            end = self._tokenizer.decode(request.prompts[0].tokens[-LAST_TOKENS:].tolist())
            self._reasoning = [Reasoning(end) for _ in request.sampling]
        self._calls: list[CallParser] | None = None
        if request.calls is not None:
            self._calls = [CallParser(request.calls) for _ in request.sampling]

    def opening(self, choice: int) -> dict[str, Any] | None:
        return self._delta(choice, {"role": "assistant", "content": ""})

    def _piece(self, choice: int, text: str, rows: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._reasoning is None and self._calls is None:
            return self._delta(choice, {"content": text}, rows)
        delta = self._split(choice, text)
        return self._delta(choice, delta or {"content": ""}, rows) if delta or rows else None

    def end(self, choice: int, generation: Generation) -> list[dict[str, Any]]:
        delta = self._split(choice, "", last=True)
        pieces = [self._delta(choice, delta)] if delta else []
        last = self._delta(choice, {}, reason=self._finish_reason(choice, generation))
        return [*pieces, last | {"ckv": cost(self._request, choice, generation)}]

    def _whole_choice(
        self, choice: int, generation: Generation, rows: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        message |= self._split(choice, generation.text, last=True)
        if calls := message.get("tool_calls"):
            message |= {"content": message["content"] or None, "tool_calls": joined(calls)}
        return {
            "index": choice,
            "message": message,
            "logprobs": self._logprobs(rows),
            "finish_reason": self._finish_reason(choice, generation),
        }

    def _split(self, choice: int, text: str, *, last: bool = False) -> dict[str, Any]:
        """Reasoning, content and calls in more text of a choice, as fields of a delta. `last`:
        nothing follows, so what was held back comes too."""
        fields: dict[str, Any] = {"reasoning_content": "", "content": text, "tool_calls": []}
        if self._reasoning is not None:
            reasoning, content = self._reasoning[choice].push(text)
            if last:
                more, rest = self._reasoning[choice].finish()
                reasoning, content = reasoning + more, content + rest
            fields |= {"reasoning_content": reasoning, "content": content}
        if self._calls is not None:
            content, calls = self._calls[choice].push(fields["content"])
            if last:
                rest, begun = self._calls[choice].finish()
                content, calls = content + rest, [*calls, *begun]
            fields |= {"content": content, "tool_calls": calls}
        return {name: part for name, part in fields.items() if part}

    def _finish_reason(self, choice: int, generation: Generation) -> str:
        called = self._calls is not None and self._calls[choice].called
        return "tool_calls" if called else _FINISH[generation.finish_reason]

    def _delta(
        self, choice: int, delta: dict[str, Any], rows: Sequence[TokenLogprob] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        return self._chunk(
            {
                "index": choice,
                "delta": delta,
                "logprobs": self._logprobs(rows),
                "finish_reason": reason,
            }
        )

    def _logprobs(self, rows: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not rows:
            return None
        return {
            "content": [
                _logprob(row) | {"top_logprobs": [_logprob(other) for other in row.top]}
                for row in rows
            ],
            "refusal": None,
        }


def _logprob(row: TokenLogprob) -> dict[str, Any]:
    return {"token": row.text, "logprob": row.value, "bytes": list(row.bytes)}


class CompletionFormat(ResponseFormat):
    """`text_completion`, whose pieces are objects of the same kind."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, request: ParsedRequest, engine: Engine) -> None:
        super().__init__(request, engine)
        self._offsets = [0] * request.num_generations
        self._echoes: list[tuple[str, list[TokenLogprob]]] = [("", []) for _ in request.prompts]

    def echo(self, scores: Sequence[Sequence[Logprobs]] | None) -> None:
        """Prompts come before what follows them; `scores` are of all their tokens but the first."""
        for i, prompt in enumerate(self._request.prompts):
            rows, tokens = [], prompt.tokens.tolist()
            text = prompt.text or self._tokenizer.decode(tokens)
            front = len(tokens) - len(self._tokenizer.without_front(prompt.tokens))
            if text.startswith(self._tokenizer.decode(tokens[:front])):
                front = 0  # else the text has no begin-of-text
            for at, token in enumerate(tokens if scores is not None else ()):
                found = scores[i][at - 1] if scores is not None and at else None
                after = tokens[max(front, at - LAST_TOKENS) : at]
                value, top = (None, ()) if found is None else (found.token, found.top)
                row = self._row(token, after, value, top)
                rows.append(row if at >= front else replace(row, text="", bytes=b""))
            self._echoes[i] = (text, rows)

    def opening(self, choice: int) -> dict[str, Any] | None:
        if not self._request.echo:
            return None
        return self._chunk(self._choice(choice, *self._echoes[choice // self._request.choices]))

    def piece(
        self, choice: int, text: str, ended: Generation | None = None
    ) -> dict[str, Any] | None:
        return None if self._request.silent else super().piece(choice, text, ended)

    def _piece(self, choice: int, text: str, rows: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._chunk(self._choice(choice, text, rows))

    def end(self, choice: int, generation: Generation) -> list[dict[str, Any]]:
        last = self._chunk(self._choice(choice, "", (), self._finish_reason(generation)))
        return [last | {"ckv": cost(self._request, choice, generation)}]

    def _whole_choice(
        self, choice: int, generation: Generation, rows: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        before, its_rows = self._echoes[choice // self._request.choices]
        text = generation.text
        if self._request.silent:
            text, rows = "", ()
        return self._choice(
            choice, before + text, [*its_rows, *rows], self._finish_reason(generation)
        )

    def _finish_reason(self, generation: Generation) -> str:
        return "length" if self._request.silent else _FINISH[generation.finish_reason]

    def _choice(
        self, choice: int, text: str, rows: Sequence[TokenLogprob], reason: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": choice,
            "text": text,
            "logprobs": self._logprobs(choice, rows),
            "finish_reason": reason,
        }

    def _logprobs(self, choice: int, rows: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not rows:
            return None
        offsets = []
        for row in rows:
            offsets.append(self._offsets[choice])
            # Characters that begin in its bytes.
            self._offsets[choice] += sum(byte & 0xC0 != 0x80 for byte in row.bytes)
        return {
            "tokens": [row.text for row in rows],
            "token_logprobs": [row.value for row in rows],
            "top_logprobs": [_by_text(row) for row in rows],
            "text_offset": offsets,
        }


def _by_text(row: TokenLogprob) -> dict[str, float] | None:
    """Log probabilities of the likeliest tokens and of `row` itself, by their text; of two with
    the same text one has its id in place of that."""
    if row.value is None:
        return None
    found: dict[str, float] = {}
    ids: set[int] = set()
    for other in (*row.top, row):
        if other.id not in ids and other.value is not None:
            ids.add(other.id)
            key = f"token_id:{other.id}" if other.text in found else other.text
            found[key] = other.value
    return found


def usage(request: ParsedRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens as OpenAI counts them: each prompt once, however many its generations."""
    prompt = request.prompt_tokens
    completion = sum(len(generation.token_ids) for generation in generations)
    if request.silent:
        completion = 0
    cached = sum(
        cached_tokens(request, i, generations[i * request.choices])
        for i in range(len(request.prompts))
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def cached_tokens(request: ParsedRequest, index: int, generation: Generation | None) -> int:
    """Tokens of a prompt, and of documents before it, whose KV came from the store; without a
    `generation`, the prompt's first that ended, as many as were stored."""
    stored = request.prompts[index].prefix.num_tokens
    if generation is None:
        return stored
    answer = generation.completion()
    if answer.documents:
        return generation.trace.blended_tokens
    return answer.prefix.num_tokens if request.documents else min(stored, answer.prefix.num_tokens)


def cost(request: ParsedRequest, choice: int, generation: Generation) -> dict[str, Any]:
    """What one generation read and cost. Bytes and chunks are those of its own prefix: reads of
    other requests in the batch are not disclosed.

    `attention_covered`: share of the probe's attention on the selected chunks, without those that
    are always kept; 1 where all were selected.
    """
    trace = generation.trace
    answer = generation.completion()
    prompt = request.prompts[choice // request.choices]
    more: dict[str, Any] = {}
    if request.target is not None and prompt.settled is not None:
        more |= {"fidelity": fidelity_of(request.budget), "settling_ms": prompt.settled.ms}
        more["settling_ssd_bytes"] = prompt.settled.ssd_bytes
    if choice in request.cited:
        more["citations"] = request.cited[choice]
    return {
        "budget": prompt.budget,
        "attention_covered": trace.attention_mass,
        "low_coverage": trace.attention_mass < LOW_COVERAGE,
        "prefix_tokens": answer.prefix.num_tokens,
        "ssd_bytes": trace.of(answer.prefix.id, "ssd"),
        "chunks_recomputed": trace.of(answer.prefix.id, "recomputed_chunks"),
        "ttft_ms": trace.ttft_ms,
        "queued_ms": generation.queued_ms,
        "waited_ms": request.waited_ms,
        "ended_by": answer.finish_reason,
    } | more
