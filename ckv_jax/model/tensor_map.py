"""Which HF tensors make up which of our parameters, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckv_jax.model.config import ModelConfig

__all__ = ["Slot", "tensor_slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter: where it is in the module tree and what it is made of.

    A kernel is HF's `[out, in]` weights end to end, transposed unless the model is `out_first`;
    a bias is HF's biases end to end; anything else is one tensor as it is.
    """

    path: tuple[str | int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # HF name and shape
    kernel: bool = False


def tensor_slots(config: ModelConfig) -> list[Slot]:
    """Every parameter of the model, in the order of the forward pass."""
    hidden, vocab = config.hidden_size, config.vocab_size
    slots = [_plain(("embedding",), "model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(config.num_layers):
        slots += _layer(config, layer)
    slots.append(_plain(("final_norm", "weight"), "model.norm.weight", (hidden,)))
    if not config.tie_word_embeddings:
        slots.append(_plain(("head",), "lm_head.weight", (vocab, hidden)))
    return slots


def _layer(config: ModelConfig, layer: int) -> Iterator[Slot]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ours, theirs = ("layers", layer), f"model.layers.{layer}"
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    yield _plain((*ours, "input_norm", "weight"), f"{theirs}.input_layernorm.weight", (hidden,))
    yield from (
        Slot(
            path=(*ours, "attention", f"{name}_{part}"),
            tensors=tuple(
                (f"{attention}.{proj}_proj.{'weight' if part == 'kernel' else 'bias'}", shape)
                for proj in projections
                for shape in [(rows, hidden) if part == "kernel" else (rows,)]
            ),
            kernel=part == "kernel",
        )
        for name, projections, rows in (("query", "q", queries), ("kv", "kv", kv))
        for part in ("kernel", "bias")
    )
    yield Slot(
        path=(*ours, "attention", "output_kernel"),
        tensors=((f"{attention}.o_proj.weight", (hidden, queries)),),
        kernel=True,
    )
    post_norm = f"{theirs}.post_attention_layernorm.weight"
    yield _plain((*ours, "post_norm", "weight"), post_norm, (hidden,))
    yield Slot(
        path=(*ours, "mlp", "gate_up_kernel"),
        tensors=tuple((f"{mlp}.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")),
        kernel=True,
    )
    yield Slot(
        path=(*ours, "mlp", "down_kernel"),
        tensors=((f"{mlp}.down_proj.weight", (hidden, inner)),),
        kernel=True,
    )


def _plain(path: tuple[str | int, ...], name: str, shape: tuple[int, ...]) -> Slot:
    return Slot(path=path, tensors=((name, shape),))
