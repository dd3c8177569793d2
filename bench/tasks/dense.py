"""Dense passes over ledgers: a prefix once, and many questions that do not see each other.

The layers are the project's own; they are stacked so that one `scan` runs (and compiles) all of
them. Attention is cut into blocks that fit a CPU's cache and is recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ckv_jax.model.config import ModelConfig
from ckv_jax.model.decoder import Layer, Transformer

__all__ = ["Params", "answer_logits", "head_logits", "join", "layer_of", "split", "text_logits"]

Params = dict[str, Any]  # "layers": one layer's state with a leading axis L; "rest": the others
_BLOCK = 256  # prefix queries scored at once
_ABREAST = 16  # questions scored at once


def split(model: Transformer) -> Params:
    """A model's parameters with the layers stacked."""
    layers = [nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in model.layers]
    rest = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    rest.pop("layers")
    return {"layers": jax.tree.map(lambda *a: jnp.stack(a), *layers), "rest": rest}


def join(params: Params, config: ModelConfig, *, dtype: str = "bfloat16") -> Transformer:
    """The model of stacked parameters, cast to `dtype`."""
    model = Transformer.abstract(config, dtype=dtype)
    state = nnx.state(model, nnx.Param)
    pure = dict(params["rest"])
    pure["layers"] = {
        i: jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        for i in range(config.num_layers)
    }
    pure = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), pure)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(model, state)
    return model


def text_logits(
    params: Params, config: ModelConfig, tokens: jax.Array, positions: jax.Array | None = None
) -> jax.Array:
    """Next-token logits `[B, S, V]` of plain text, at `positions` [S] if they are given."""
    positions = (jnp.arange(tokens.shape[1]) if positions is None else positions)[None, :]
    hidden = _run(params, config, tokens, positions, prefix=tokens.shape[1], suffix=1)
    return head_logits(params, config, hidden)


def answer_logits(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,  # int32 [B, T]
    questions: jax.Array,  # int32 [B, Q, S]
    lengths: jax.Array,  # int32 [B, Q]
    positions: jax.Array | None = None,  # int32 [T]: where the prefix's tokens are said to stand
    *,
    light: bool = False,
) -> jax.Array:
    """Logits `[B, Q, V]` after each question, every one asked right after the prefix.

    `light` leaves the prefix's hidden states out of the gradient.
    """
    batch, prefix = tokens.shape
    count, suffix = questions.shape[1:]
    positions = jnp.arange(prefix) if positions is None else positions
    asked = jnp.tile(positions[-1] + 1 + jnp.arange(suffix), count)
    positions = jnp.concatenate([positions, asked])[None, :]
    if light:
        hidden = _run_light(params, config, tokens, questions, positions)
    else:
        every = jnp.concatenate([tokens, questions.reshape(batch, -1)], axis=1)
        hidden = _run(params, config, every, positions, prefix=prefix, suffix=suffix)[:, prefix:]
    tail = hidden.reshape(batch, count, suffix, -1)
    last = jnp.take_along_axis(tail, (lengths - 1)[:, :, None, None], axis=2)[:, :, 0]
    return head_logits(params, config, last)


def layer_of(config: ModelConfig, state: Any) -> Layer:
    """A layer with the given parameters."""
    whole = {name: getattr(config, name) for name in config.__slots__}
    one = Transformer.abstract(ModelConfig(**whole | {"num_layers": 1}))
    layer: Layer = nnx.merge(nnx.graphdef(one.layers[0]), nnx.State(state))
    return layer


def head_logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Final norm and head over `[B, S, E]`, float32."""
    rest = params["rest"]
    mean_square = jnp.mean(hidden * hidden, axis=-1, keepdims=True)
    normed = hidden * jax.lax.rsqrt(mean_square + config.rms_norm_eps)
    normed = normed * rest["final_norm"]["weight"][None, None, :]
    table = rest["embedding"] if config.tie_word_embeddings else rest["head"]
    return jnp.einsum("bse,ve->bsv", normed, table)


def _run(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    prefix: int,
    suffix: int,
) -> jax.Array:
    """Float32 hidden states after the last layer."""

    def step(hidden: jax.Array, state: Any) -> tuple[jax.Array, None]:
        layer = layer_of(config, state)
        q, k, v = layer.project(hidden, positions)
        return layer.complete(hidden, _attend(q, k, v, prefix, suffix)), None

    hidden, _ = jax.lax.scan(step, params["rest"]["embedding"][tokens], params["layers"])
    return hidden


def _run_light(
    params: Params, config: ModelConfig, tokens: jax.Array, asked: jax.Array, positions: jax.Array
) -> jax.Array:
    """Hidden states `[B, Q * S, E]` of the questions `[B, Q, S]`, as `_run`, for training.

    The prefix's own hidden states are constants to the gradient, so that it reaches a layer's
    keys and values and everything of the questions, but no backward pass over the prefix is
    needed: a third of the work.
    """
    prefix, suffix = tokens.shape[1], asked.shape[2]
    constant = jax.tree.map(jax.lax.stop_gradient, params)

    def step(carry: tuple[jax.Array, jax.Array], states: Any) -> tuple[Any, None]:
        before, hidden = carry
        layer, frozen = (layer_of(config, state) for state in states)
        q, k, v = frozen.project(before, positions[:, :prefix])
        heads = _attend(q, k, v, prefix, suffix)
        _, k, v = layer.attention.project(frozen.input_norm(before), positions[:, :prefix])
        before = frozen.complete(before, heads)
        own = layer.project(hidden, positions[:, prefix:])
        k, v = (jnp.concatenate(pair, axis=1) for pair in ((k, own[1]), (v, own[2])))
        heads = _attend(own[0], k, v, prefix, suffix)
        return (before, layer.complete(hidden, heads)), None

    before = constant["rest"]["embedding"][tokens]
    hidden = params["rest"]["embedding"][asked.reshape(len(asked), -1)]
    layers = (params["layers"], constant["layers"])
    (_, hidden), _ = jax.lax.scan(step, (before, hidden), layers)
    return hidden


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, prefix: int, suffix: int) -> jax.Array:
    """`[B, S, H, D]`: prefix tokens causally, then blocks of `suffix` tokens beside each other.

    Queries of the questions alone may be given.
    """
    tail = k.shape[1] - prefix
    alone = q.shape[1] == tail

    @jax.checkpoint
    def sequence(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (jnp.moveaxis(x, 1, 0) for x in (q, k, v))  # [H, S, D]
        groups = q.shape[0] // k.shape[0]
        k, v = (jnp.repeat(x, groups, axis=0) for x in (k, v))
        q = q * q.shape[-1] ** -0.5
        parts = []
        for start in () if alone else range(0, prefix, _BLOCK):
            stop = min(start + _BLOCK, prefix)
            scores = jnp.einsum("hsd,htd->hst", q[:, start:stop], k[:, :stop])
            seen = np.arange(stop)[None, :] <= np.arange(start, stop)[:, None]
            scores = jnp.where(seen[None], scores, -1e9)
            weight, total = _soft(scores, scores.max(-1, keepdims=True))
            parts.append(jnp.einsum("hst,htd->hsd", weight, v[:, :stop]) / total)
        if tail:
            parts.append(_suffixes(q[:, q.shape[1] - tail :], k, v, prefix, suffix))
        return jnp.moveaxis(jnp.concatenate(parts, axis=1), 0, 1)

    return jax.lax.map(lambda x: sequence(*x), (q, k, v))


def _suffixes(q: jax.Array, k: jax.Array, v: jax.Array, prefix: int, suffix: int) -> jax.Array:
    """Questions [H, Q * S, D] over the prefix and themselves, `_ABREAST` questions at a time."""
    heads, tail, dim = q.shape
    count = tail // suffix
    abreast = next(n for n in range(min(_ABREAST, count), 0, -1) if count % n == 0)
    blocks = [
        jnp.moveaxis(x.reshape(heads, -1, abreast, suffix, dim), 1, 0)
        for x in (q, k[:, prefix:], v[:, prefix:])
    ]
    past = k[:, :prefix], v[:, :prefix]
    out = jax.lax.map(jax.checkpoint(lambda x: _questions(*x, *past)), tuple(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(heads, tail, dim)


def _questions(
    q: jax.Array, k: jax.Array, v: jax.Array, k_past: jax.Array, v_past: jax.Array
) -> jax.Array:
    heads, count, suffix, dim = q.shape
    own = jnp.einsum("hqsd,hqtd->hqst", q, k)
    own = jnp.where(np.tri(suffix, dtype=bool)[None, None], own, -1e9)
    far = jnp.einsum("hsd,htd->hst", q.reshape(heads, -1, dim), k_past)
    far = far.reshape(heads, count, suffix, -1)
    top = jnp.maximum(far.max(-1, keepdims=True), own.max(-1, keepdims=True))
    far, total = _soft(far, top)
    own, more = _soft(own, top)
    out = jnp.einsum("hst,htd->hsd", far.reshape(heads, count * suffix, -1), v_past)
    out = out.reshape(q.shape) + jnp.einsum("hqst,hqtd->hqsd", own, v)
    return out / (total + more)


def _soft(scores: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights = jnp.exp(scores - jax.lax.stop_gradient(top))
    return weights, weights.sum(-1, keepdims=True)
