"""OpenTelemetry spans of requests, made of what was measured anyway, once they are over."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

from ckv_jax.request import Generation
from ckv_jax.server.asked import Asked
from ckv_jax.trace import STAGES

_MOST_STAGES = 200  # of one text


class Spans:
    """Tells a tracer of requests; without a provider that records, it does nothing."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("ckv_jax", tracer_provider=provider)

    def answered(
        self,
        path: str,
        headers: Mapping[str, str],
        asked: Asked,
        generations: Mapping[int, Generation],
        *,
        why: str | None,
        arrived_ns: int,
        submitted_ns: int,
    ) -> None:
        """One request is over; `why`: what cut it off. `generations` that ended, by choice.
        `headers`: its own; a `traceparent` in them is the parent. Times are those of
        `time.perf_counter_ns`.

        Each text has the spans `prepare`, `queue` and `prefill`, which follow on one another and
        sum to its time to first token, and `decode`; within `prefill` are its stages.
        """
        parent = propagate.extract(headers)
        epoch = time.time_ns() - time.perf_counter_ns()
        root = self._tracer.start_span(
            f"POST {path}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=epoch + arrived_ns,
            attributes={
                "ckv.model": asked.model,
                "ckv.budget": asked.budget,
                "ckv.texts": asked.texts,
                "ckv.prompt_tokens": sum(len(prompt.tokens) for prompt in asked.prompts),
            },
        )
        if root.is_recording():
            for choice, generation in generations.items():
                self._text(root, epoch, (arrived_ns, submitted_ns), choice, generation)
            if why is not None:
                root.set_status(Status(StatusCode.ERROR, why))
        root.end()

    def _text(
        self,
        root: Span,
        epoch: int,
        before: tuple[int, int],
        choice: int,
        generation: Generation,
    ) -> None:
        measured = generation.trace
        first = measured.start_ns if measured.end_ns is None else measured.end_ns
        answer = generation.completion()
        text = self._child(
            root,
            f"text {choice}",
            epoch + before[0],
            epoch + first + int(generation.decode_ms * 1e6),
            {
                "ckv.ttft_ms": (first - before[0]) / 1e6,
                "ckv.prefix_tokens": answer.prefix.num_tokens,
                "ckv.generated_tokens": len(answer.token_ids),
                "ckv.ssd_bytes": measured.of(answer.prefix.id, "ssd"),
                "ckv.attention_covered": measured.attention_mass,
                "ckv.chunks_recomputed": measured.of(answer.prefix.id, "recomputed_chunks"),
            },
        )
        marks = (*before, measured.start_ns, first)
        for name, start, end in zip(
            ("prepare", "queue", "prefill"), marks, marks[1:], strict=False
        ):
            span = self._child(text, name, epoch + start, epoch + max(start, end), {})
            if name == "prefill":
                stages = [s for s in measured.spans if s.name in STAGES]
                for stage in stages[:_MOST_STAGES]:
                    start_ns = max(stage.start_ns, measured.start_ns)
                    end_ns = min(stage.end_ns, first)
                    if end_ns > start_ns:
                        self._child(span, stage.name, epoch + start_ns, epoch + end_ns, {})
        end_ns = first + int(generation.decode_ms * 1e6)
        self._child(text, "decode", epoch + first, epoch + end_ns, {})

    def _child(
        self, parent: Span, name: str, start: int, end: int, attributes: Mapping[str, float]
    ) -> Span:
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(parent),
            start_time=start,
            attributes=attributes,
        )
        span.end(end)
        return span
