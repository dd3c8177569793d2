"""Qwen2.5 in numpy and float64, written from HF's names alone: a second opinion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ckv_jax.model.config import ModelConfig

LayerKv = tuple[np.ndarray, np.ndarray]
"""One layer's keys and values [T, K, D], keys rotated."""


class NumpyQwen:
    """Weights under HF's names, drawn so that attention is sharp and depends on positions."""

    def __init__(self, config: ModelConfig, *, seed: int, spread: float = 0.5) -> None:
        assert config.rope_scaling is None and not config.tie_word_embeddings
        self.config = config
        rng = np.random.default_rng(seed)
        hidden, inner = config.hidden_size, config.intermediate_size
        rows = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}

        def drawn(*shape: int, scale: float = spread) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32) * np.float32(scale)

        weights = {
            "model.embed_tokens.weight": drawn(config.vocab_size, hidden, scale=1.0),
            "model.norm.weight": 1 + drawn(hidden, scale=0.1),
            "lm_head.weight": drawn(config.vocab_size, hidden, scale=1.0),
        }
        for layer in range(config.num_layers):
            at = f"model.layers.{layer}"
            for name, heads in rows.items():
                weights[f"{at}.self_attn.{name}_proj.weight"] = drawn(
                    heads * config.head_dim, hidden, scale=spread * hidden**-0.5 * 3
                )
                weights[f"{at}.self_attn.{name}_proj.bias"] = drawn(heads * config.head_dim)
            weights[f"{at}.self_attn.o_proj.weight"] = drawn(
                hidden, config.num_heads * config.head_dim, scale=spread * hidden**-0.5
            )
            for name, shape in (
                ("gate", (inner, hidden)),
                ("up", (inner, hidden)),
                ("down", (hidden, inner)),
            ):
                weights[f"{at}.mlp.{name}_proj.weight"] = drawn(*shape, scale=hidden**-0.5)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                weights[f"{at}.{norm}.weight"] = 1 + drawn(hidden, scale=0.1)
        self.weights = weights

    def save(self, folder: Path) -> None:
        """A checkpoint folder as HF writes it, without a tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config.to_hf(dtype="float32")))

    def _of(self, name: str) -> np.ndarray:
        return self.weights[name].astype(np.float64)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """float64 [S, E]."""
        return self._of("model.embed_tokens.weight")[tokens]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """[E] -> [V]."""
        return self._of("lm_head.weight") @ self._norm(hidden, "model.norm.weight")

    def query(self, layer: int, hidden: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotated queries [S, H, D] of hidden states [S, E] at these positions."""
        return self.rotated(self._projected(layer, "q", hidden), positions)

    def kv(self, layer: int, hidden: np.ndarray, positions: np.ndarray) -> LayerKv:
        """Keys and values [S, K, D]."""
        keys = self.rotated(self._projected(layer, "k", hidden), positions)
        return keys, self._projected(layer, "v", hidden)

    def layer(
        self, layer: int, hidden: np.ndarray, positions: np.ndarray, kv: LayerKv, seen: np.ndarray
    ) -> np.ndarray:
        """The hidden states [S, E] after a layer whose queries see the tokens `seen` [S, T], or
        [H, S, T]."""
        config, at = self.config, f"model.layers.{layer}"
        group = config.num_heads // config.num_kv_heads
        keys, values = (np.repeat(x, group, axis=1) for x in kv)  # [T, H, D]
        logits = np.einsum("shd,thd->hst", self.query(layer, hidden, positions), keys)
        weights = softmax(np.where(seen, logits * config.head_dim**-0.5, -np.inf))
        heads = np.einsum("hst,thd->shd", weights, values).reshape(len(hidden), -1)
        hidden = hidden + heads @ self._of(f"{at}.self_attn.o_proj.weight").T
        x = self._norm(hidden, f"{at}.post_attention_layernorm.weight")
        gate, up = (x @ self._of(f"{at}.mlp.{name}_proj.weight").T for name in ("gate", "up"))
        inner = gate / (1 + np.exp(-gate)) * up
        return hidden + inner @ self._of(f"{at}.mlp.down_proj.weight").T

    def prefill(self, tokens: np.ndarray) -> list[LayerKv]:
        """Every layer's keys and values of a dense causal pass."""
        positions, found = np.arange(len(tokens)), []
        hidden, causal = self.embed(tokens), np.tri(len(tokens), dtype=bool)
        for layer in range(self.config.num_layers):
            found.append(self.kv(layer, hidden, positions))
            hidden = self.layer(layer, hidden, positions, found[-1], causal)
        return found

    def _projected(self, layer: int, name: str, hidden: np.ndarray) -> np.ndarray:
        at = f"model.layers.{layer}"
        x = self._norm(hidden, f"{at}.input_layernorm.weight")
        proj = f"{at}.self_attn.{name}_proj"
        flat = x @ self._of(f"{proj}.weight").T + self._of(f"{proj}.bias")
        return flat.reshape(len(hidden), -1, self.config.head_dim)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * self._of(name)

    def rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        half = self.config.head_dim // 2
        turn = self.config.rope_theta ** -(np.arange(half) / half)
        angle = (positions[:, None] * turn)[:, None]  # [S, 1, D/2]
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
