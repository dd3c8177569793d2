"""Sampling of the next token: greedy, temperature, top-k and top-p, with a seed per request, and
the defaults of a checkpoint's `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, UInt32

from ckv_jax.errors import CheckpointError, WrongType, check_number, check_whole
from ckv_jax.model.config import read_generation_config
from ckv_jax.model.grammar import Grammar

MOST_LOGPROBS = 20

_HOTTEST = float(np.finfo(np.float32).max)
_COLDEST = float(np.finfo(np.float32).tiny)  # anything colder is rounded to 0 by some devices
_TOP_K = 50  # what HF takes where a config that samples names none
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
}
"""Settings that are not supported and would change which tokens are drawn, with their neutral
values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one generation.

    Token t of a request depends only on its logits, its seed and t, never on the rest of the batch.
    Raises `ValueError` for a value out of range, `WrongType` for a value of another type.
    """

    temperature: float = 0.0
    """0 (or less than float32's smallest normal number, 1.2e-38) selects the likeliest token; 1
    samples the model's own distribution."""
    top_p: float = 1.0
    """Nucleus sampling: keep the likeliest tokens that together reach this probability, in
    (0, 1]."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0: all."""
    seed: int = 0
    """Seed of the random draws, 0 to 2**32 - 1."""
    max_tokens: int = 128
    """Maximum number of tokens, including the one that ends the generation."""
    min_tokens: int = 0
    """Minimum number of tokens; before that, no token and no stop string ends the generation."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the generation, besides the model's end-of-text ids."""
    ignore_eos: bool = False
    """Whether the generation continues past the model's end-of-text ids, which its text omits."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation; they are not part of its text."""
    logprobs: int | None = None
    """Number of the likeliest tokens (0 to 20) whose log probabilities are returned besides the
    token's own; None: none."""
    grammar: Grammar | None = None
    """Grammar that the text must match, see `Engine.grammar`; the generation ends where the grammar
    allows no further token."""
    forced_ids: tuple[int, ...] = ()
    """Token ids that the generation begins with, in place of sampled ones: to measure a known
    text."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            check_number(name, getattr(self, name))
        if not 0.0 <= self.temperature <= _HOTTEST:
            raise ValueError(f"got temperature={self.temperature}, expected 0 to {_HOTTEST:.2g}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"got top_p={self.top_p}, expected a share in (0, 1]")
        check_whole("top_k", self.top_k, least=0, most=2**31 - 1)
        check_whole("seed", self.seed, least=0, most=2**32 - 1)
        check_whole("max_tokens", self.max_tokens, least=1)
        check_whole("min_tokens", self.min_tokens, least=0, most=self.max_tokens)
        if not isinstance(self.ignore_eos, bool):
            raise WrongType(f"got ignore_eos={self.ignore_eos!r}, expected a bool")
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, least=0, most=MOST_LOGPROBS)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise WrongType(f"got grammar={self.grammar!r}, expected one of Engine.grammar")
        for name in ("stop_token_ids", "stop", "forced_ids"):
            if not isinstance(getattr(self, name), tuple):
                raise WrongType(f"got {name}={getattr(self, name)!r}, expected a tuple")
        for name in ("stop_token_ids", "forced_ids"):
            for token in getattr(self, name):
                check_whole(name, token, least=0, most=2**31 - 1)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"got stop={self.stop!r}, expected a tuple of non-empty strings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log probabilities of one token, by the model's distribution without temperature or cuts."""

    token: float
    """Natural logarithm of the token's probability."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of the likeliest tokens, best first."""


def logprobs(logits: np.ndarray, token: int, count: int) -> Logprobs:
    """Computes the log probabilities of `token` and the `count` likeliest tokens, from one
    request's logits float32 [V]."""
    wide = np.asarray(logits, np.float64)
    most = wide.max()
    normal = wide - most - np.log(np.exp(wide - most).sum())
    likeliest = np.argsort(-normal, kind="stable")[:count]
    return Logprobs(
        token=float(normal[token]), top=tuple((int(i), float(normal[i])) for i in likeliest)
    )


@partial(jax.jit, static_argnames="count")
def rank(
    logits: Float[Array, "n V"], tokens: Int[Array, " n"], *, count: int
) -> tuple[Float[Array, " n"], Int[Array, "n c"], Float[Array, "n c"]]:
    """Computes for each row the log probability of its token, and the `count` likeliest ids with
    theirs."""
    normal = jax.nn.log_softmax(logits, axis=-1)
    best, ids = jax.lax.top_k(normal, count)
    return jnp.take_along_axis(normal, tokens[:, None], axis=-1)[:, 0], ids, best


def without(logits: Float[ArrayLike, "B V"], banned: Mapping[int, Sequence[int]]) -> Array:
    """`logits` with those of some ids of some rows at minus infinity."""
    pairs = [(row, id_) for row, ids in banned.items() for id_ in ids]
    rows, ids = np.asarray(pairs, np.int32).reshape(-1, 2).T
    return jnp.asarray(logits).at[rows, ids].set(-jnp.inf)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """The parameters of a batch, as arguments of a jitted call."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    seed: UInt32[Array, " B"]


def stack_params(params: Sequence[SamplingParams]) -> SamplingArrays:
    """One entry for each request of a batch, in order."""
    warmth = [p.temperature if p.temperature >= _COLDEST else 0.0 for p in params]
    return SamplingArrays(
        temperature=jnp.asarray(np.asarray(warmth, np.float32)),
        top_p=jnp.asarray(np.asarray([p.top_p for p in params], np.float32)),
        top_k=jnp.asarray(np.asarray([p.top_k for p in params], np.int32)),
        seed=jnp.asarray(np.asarray([p.seed for p in params], np.uint32)),
    )


@jax.jit
def sample(
    logits: Float[Array, "B V"], params: SamplingArrays, steps: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The next token of each request, int32; `steps` counts the tokens it has generated so far.

    Temperature 0 is the argmax (the lowest id among equals). Otherwise the logits, less the
    largest one so that no temperature makes them infinite, are divided by the temperature, cut to
    `top_k`, then to the smallest set that reaches `top_p` of what is left (equals of the last one
    in either set stay in); a Gumbel draw for each id, from the request's seed and step, chooses
    within it. A batch pays for drawing and for sorting only if one of its requests asks for it.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawing = params.temperature > 0

    def draw() -> Int[Array, " B"]:
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = below / jnp.where(drawing, params.temperature, 1.0)[:, None]
        cut = drawing & ((params.top_k > 0) | (params.top_p < 1))
        least = jax.lax.cond(
            jnp.any(cut),
            lambda: _least_kept(scaled, params),
            lambda: jnp.full(cut.shape, -jnp.inf, jnp.float32),
        )
        noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(params.seed, steps, logits.shape[1])
        open_to = scaled >= jnp.where(cut, least, -jnp.inf)[:, None]
        drawn = jnp.argmax(jnp.where(open_to, scaled + noise, -jnp.inf), axis=-1)
        return jnp.where(drawing, drawn.astype(jnp.int32), greedy)

    tokens: Int[Array, " B"] = jax.lax.cond(jnp.any(drawing), draw, lambda: greedy)
    return tokens


def _least_kept(scaled: Float[Array, "B V"], params: SamplingArrays) -> Float[Array, " B"]:
    """The smallest logit that top-k and top-p leave in; the largest always stays."""
    ranked = jnp.sort(scaled, axis=-1, descending=True)
    rank = jnp.arange(scaled.shape[1])[None, :]
    k = params.top_k[:, None]
    kept = (k == 0) | (rank < k)
    share = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(share, axis=-1) - share  # probability of everything likelier
    p = params.top_p[:, None]
    kept &= (before < p) | (p >= 1)
    return jnp.min(jnp.where(kept | (rank == 0), ranked, jnp.inf), axis=-1)


def _gumbel(seed: UInt32[Array, ""], step: Int[Array, ""], size: int) -> Float[Array, " V"]:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), step), (size,), jnp.float32)


# -- defaults of a checkpoint ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Default sampling of a checkpoint; its end-of-text ids are in its `ModelConfig`."""

    sampling: SamplingParams
    ignored: Mapping[str, Any]
    """Settings that ask for something that is not built here, as the file has them."""


def generation_defaults(folder: Path) -> GenerationDefaults:
    """The settings of a folder's `generation_config.json`; greedy where there is none.

    As in HF, temperature, top-k (50 if not named) and top-p count only with `do_sample`. Raises
    `CheckpointError` for a file that is not JSON or holds values that mean nothing.
    """
    values = read_generation_config(folder)
    given: dict[str, Any] = {}
    if values.get("do_sample"):
        given = {"temperature": 1.0, "top_p": 1.0, "top_k": _TOP_K}
        given |= {name: values[name] for name in given if values.get(name) is not None}
    if values.get("max_new_tokens") is not None:
        given["max_tokens"] = values["max_new_tokens"]
    try:
        sampling = SamplingParams(**given)
    except ValueError as error:
        raise CheckpointError(f"generation_config.json in {folder}: {error}") from error
    ignored = {
        name: values[name]
        for name, neutral in _NEUTRAL.items()
        if values.get(name) is not None and values[name] not in neutral
    }
    return GenerationDefaults(sampling=sampling, ignored=ignored)
