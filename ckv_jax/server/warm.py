"""Getting ready: what first requests would wait for is compiled before anybody is sent here."""

from __future__ import annotations

import secrets
import time

import numpy as np

from ckv_jax.engine import Engine
from ckv_jax.errors import CkvError
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.request import Request
from ckv_jax.server import log
from ckv_jax.server.config import ServerConfig
from ckv_jax.storage.index.wishes import Wish

_BATCH = 2
_QUESTION = 64
_ANSWER = 64
_LEFT_S = 3600.0  # where the process dies meanwhile, what was made up goes after so long


def check(engine: Engine, tokens: int) -> None:
    """Raises `ValueError` where the model's context has no room for prompts of so many tokens."""
    limit = engine.model_config.max_position_embeddings
    if tokens and tokens + _QUESTION + _ANSWER > limit:
        raise ValueError(
            f"got warm_tokens={tokens}, expected at most {limit - _QUESTION - _ANSWER}: this "
            f"model's context has room for {limit} tokens"
        )


def warm_up(engine: Engine, config: ServerConfig) -> None:
    """Answers made-up prompts of `config.warm_tokens` tokens, new and stored, up to two at once,
    at the budget that the server answers by; they are stored for a tenant of their own, and
    removed again. What goes wrong is logged: the server serves all the same.
    """
    began, salt = time.monotonic(), f"warm-up {secrets.token_hex(16)}"
    tokens = (np.arange(config.warm_tokens + 1) % engine.model_config.vocab_size).tolist()
    request = Request(prefix=tokens[:-1], suffix=tokens[-1:], budget=1.0, salt=salt)
    try:
        stream = engine.generate(
            request, SamplingParams(max_tokens=2, temperature=1.0), keep_kv=True
        )
        prefix = engine.append(stream.results()[0])
        try:
            engine.store.set_wish(prefix.id, Wish(retain_s=_LEFT_S), salt=salt)
            engine.warmup(
                prefix,
                max_batch=_BATCH,
                max_suffix=_QUESTION,
                budgets=[config.budget],
                max_tokens=_ANSWER,
            )
        finally:
            engine.store.delete(prefix)
    except (CkvError, OSError, ValueError) as error:
        log.event("not_warmed", why=type(error).__name__)
    else:
        log.event("warmed", seconds=round(time.monotonic() - began, 1))
