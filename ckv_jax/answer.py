"""One answer as JSON: the object that `ckv ask`, `ckv batch` and `ckv demo` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckv_jax.engine import Engine
from ckv_jax.request import Result
from ckv_jax.storage.prefix import Prefix

__all__ = ["answer_json"]


def answer_json(
    result: Result, engine: Engine, prefix: Prefix, *, model: str, question: str | Sequence[int]
) -> dict[str, Any]:
    """`result` of asking `question` over `prefix`. Times in ms; bytes by where they came from.

    `attention_mass` is the share of the probe's attention on the chosen chunks, averaged over
    periods; 1 where nothing was left out.
    """
    trace, budget = result.trace, result.request.budget
    return {
        "system": engine.system.name,
        "model": model,
        "budget": engine.config.budget if budget is None else budget,
        "prefix_tokens": prefix.num_tokens,
        "suffix_tokens": len(engine.encode(question)),
        "token_id": result.token_id,
        "text": result.text,
        "ttft_ms": trace.ttft_ms,
        "breakdown_ms": trace.breakdown_ms,
        "bytes": {source: trace.bytes[source] for source in ("ssd", "host", "device")},
        "chunks": {name: trace.chunks[name] for name in ("selected", "total")},
        "attention_mass": trace.attention_mass,
    }
