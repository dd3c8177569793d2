"""One answer as JSON: the object that `ckv ask`, `ckv batch` and `ckv demo` print."""

from __future__ import annotations

from typing import Any

from ckv_jax.engine import Engine
from ckv_jax.request import Generation, Result
from ckv_jax.storage.prefix import Prefix

__all__ = ["answer_json"]


def answer_json(
    outcome: Result | Generation, engine: Engine, *prefixes: Prefix, model: str
) -> dict[str, Any]:
    """What was asked over a prefix, or over several as parts, and what came of it. Times in ms;
    bytes by where they came from.

    `attention_mass` is the share of the probe's attention on the chosen chunks, averaged over
    periods; 1 where nothing was left out. `codec` is what the stored KV was encoded with: a budget
    of 1 is exact up to that. `chunks.selected` of `chunks.total` were attended to,
    `period_chunks` of them in each period; `ssd_bytes_unused` is the part of `bytes.ssd` that was
    read ahead and not used; `recomputed_chunks` could not be read and were computed again.
    `compiled` programs were not there yet: compiling or loading them is part of `ttft_ms`. A
    generation also has its number of tokens, the time from its first token to its last, tokens a
    second in between, why it ended, and where what its tokens chose came from (`Trace.decode`).
    Over parts, `blended_tokens` were attended to as stored and `recomputed_tokens` computed again.
    Raises the outcome's error, if it has one.
    """
    outcome.raise_for_error()
    trace, budget = outcome.trace, outcome.request.budget
    values = {
        "system": engine.system.name,
        "model": model,
        "codec": outcome.codec,
        "budget": engine.config.budget if budget is None else budget,
        "prefix_tokens": sum(prefix.num_tokens for prefix in prefixes),
        "suffix_tokens": len(engine.encode(outcome.request.suffix)),
        "token_id": 0,
        "text": outcome.text,
        "ttft_ms": trace.ttft_ms,
        "breakdown_ms": trace.breakdown_ms,
        "bytes": {source: trace.bytes[source] for source in ("ssd", "host", "device")},
        "ssd_bytes_unused": trace.bytes["unused"],
        "recomputed_chunks": trace.recomputed_chunks,
        "compiled": trace.compiled,
        "chunks": {name: trace.chunks[name] for name in ("selected", "total")},
        "period_chunks": trace.period_chunks,
        "attention_mass": trace.attention_mass,
    }
    if len(prefixes) > 1:
        values["blended_tokens"] = trace.blended_tokens
        values["recomputed_tokens"] = trace.recomputed_tokens
    if isinstance(outcome, Result):
        return values | {"token_id": outcome.token_id}
    later = len(outcome.token_ids) - 1
    return values | {
        "token_id": int(outcome.token_ids[0]),
        "generated_tokens": len(outcome.token_ids),
        "decode_ms": outcome.decode_ms,
        "tokens_s": 1e3 * later / outcome.decode_ms if later and outcome.decode_ms else 0.0,
        "decode": trace.decode,
        "finish_reason": outcome.finish_reason,
    }
