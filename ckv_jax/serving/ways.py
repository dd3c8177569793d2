"""The requests of one call, and the way that each of them goes on after its first token."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one request goes on after its first token; without `sampling` it does not."""

    sampling: SamplingParams | None = None
    keep_kv: bool = False


def several(requests: Several[Request]) -> list[Request]:
    """The requests of one call; refuses an empty call and what is no list."""
    if not isinstance(requests, Several):
        raise TypeError(f"got {type(requests).__name__}, expected a list of Requests")
    if len(requests) == 0:
        raise ValueError("got an empty batch, expected at least one request")
    return list(requests)


def sampled(
    requests: Request | Several[Request],
    sampling: SamplingParams | Several[SamplingParams] | None,
    default: SamplingParams,
    keep_kv: bool | Several[bool],
) -> tuple[list[Request], list[Way]]:
    """Each request of a `generate` call with how it goes on."""
    asked = [requests] if isinstance(requests, Request) else several(requests)
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or default] * len(asked)
    if len(sampling) != len(asked):
        raise ValueError(f"got {len(sampling)} samplings, expected {len(asked)}, one per request")
    kept = [keep_kv] * len(asked) if isinstance(keep_kv, bool) else keep_kv
    return asked, [
        Way(sampling=params, keep_kv=keep) for params, keep in zip(sampling, kept, strict=True)
    ]
