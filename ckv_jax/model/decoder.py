"""The decoder of every family in Flax nnx: grouped-query attention, SwiGLU, RMSNorm, RoPE.

Parameters live in the model's dtype. Every matmul accumulates in float32; norms, softmax and
rotation are computed in float32; the hidden state between layers is in the model's dtype.
Kernels are `[in, out]`, or `[out, in]` where the model says `out_first`: a CPU multiplies a few
16-bit rows fastest by that, and float32 by the other. All layers of a model have the same
graphdef, so that one jitted function of a layer's state serves every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int8

from ckv_jax.kernels_pallas.native.library import most_rows, multiply_rows
from ckv_jax.kernels_pallas.target import Kernel, Target, dispatch
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.rope import apply_rope, rope_tables
from ckv_jax.model.shardings import ONE_DEVICE, Shardings

Attend = Callable[[Array, Array, Array], Array]  # q [B S H D], k, v [B S K D] -> heads [B S H D]

_INIT_SCALE = 0.02  # standard deviation of fresh kernels and embeddings, as in HF


class ModuleOptions(NamedTuple):
    """What all modules of a model are made with, see `Transformer`."""

    dtype: str
    rngs: nnx.Rngs | None
    out_first: bool
    target: Target
    shardings: Shardings = ONE_DEVICE


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the last axis, with a learned scale `[size]`."""

    def __init__(self, size: int, config: ModelConfig, *, dtype: str) -> None:
        self.eps = config.rms_norm_eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Float[Array, "B S *heads E"]) -> Float[Array, "B S *heads E"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        return (normed * jnp.expand_dims(weight, range(x.ndim - 1))).astype(x.dtype)


class Attention(nnx.Module):
    """The projections of one attention layer; the attention itself belongs to the caller.

    Biases, and norms of each head's queries and keys, are there if the config says so.
    """

    def __init__(self, config: ModelConfig, options: ModuleOptions) -> None:
        self.config = config
        self.out_first = options.out_first
        self.target = options.target
        self.shardings = options.shardings
        dtype = options.dtype
        hidden, dim = config.hidden_size, config.head_dim
        queries, kv = config.num_heads * dim, config.num_kv_heads * dim
        self.query_kernel = _kernel((hidden, queries), options)
        self.kv_kernel = _kernel((hidden, 2 * kv), options)  # keys, then values
        self.output_kernel = _kernel((queries, hidden), options)
        if config.qkv_bias:
            self.query_bias = _bias(queries, dtype)
            self.kv_bias = _bias(2 * kv, dtype)
        if config.attention_bias:
            self.output_bias = _bias(hidden, dtype)
        if config.family.query_key_norm:
            self.query_norm = RMSNorm(dim, config, dtype=dtype)
            self.key_norm = RMSNorm(dim, config, dtype=dtype)

    def project(
        self, x: Float[Array, "B S E"], positions: Int[Array, "B S"]
    ) -> tuple[Float[Array, "B S H D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
        """Queries, keys and values of normed `x`, in its dtype; queries and keys rotated."""
        cos, sin = rope_tables(self.config, positions)
        q = self._rotated_queries(x, cos, sin)
        k, v = jnp.split(self._heads(x, "kv"), 2, axis=2)
        if self.config.family.query_key_norm:
            k = self.key_norm(k)
        return q, apply_rope(k, cos, sin).astype(x.dtype), v.astype(x.dtype)

    def query(
        self, x: Float[Array, "B S E"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H D"]:
        """The queries of `project` alone."""
        return self._rotated_queries(x, *rope_tables(self.config, positions))

    def output(self, heads: Float[Array, "B S H D"]) -> Float[Array, "B S E"]:
        """Attended heads back to the hidden size, in the dtype of `heads`."""
        flat = heads.reshape(*heads.shape[:2], -1)  # [B, S, H*D]
        out = _linear(self, flat, "output", partial=True)
        return out.astype(heads.dtype)

    def _rotated_queries(
        self, x: Float[Array, "B S E"], cos: Float[Array, "B S D"], sin: Float[Array, "B S D"]
    ) -> Float[Array, "B S H D"]:
        q = self._heads(x, "query")
        if self.config.family.query_key_norm:
            q = self.query_norm(q)
        return apply_rope(q, cos, sin).astype(x.dtype)

    def _heads(self, x: Float[Array, "B S E"], name: str) -> Float[Array, "B S N D"]:
        return _linear(self, x, name).reshape(*x.shape[:2], -1, self.config.head_dim)


class Mlp(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, options: ModuleOptions) -> None:
        self.out_first = options.out_first
        self.target = options.target
        self.shardings = options.shardings
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_kernel = _kernel((hidden, 2 * inner), options)  # gate, then up
        self.down_kernel = _kernel((inner, hidden), options)
        if config.mlp_bias:
            self.gate_up_bias = _bias(2 * inner, options.dtype)
            self.down_bias = _bias(hidden, options.dtype)

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        both = _linear(self, x, "gate_up")
        gate, up = jnp.split(both, 2, axis=-1)  # [B, S, F] each
        inner = (jax.nn.silu(gate) * up).astype(x.dtype)
        out = _linear(self, inner, "down", partial=True)
        return out.astype(x.dtype)


class Layer(nnx.Module):
    """One pre-norm decoder layer.

    Callers that keep the keys and values, or that attend elsewhere than in the same trace, take
    it in two halves: `project`, then `complete`. Only `complete` knows the residual wiring.
    """

    def __init__(self, config: ModelConfig, options: ModuleOptions) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config, dtype=options.dtype)
        self.attention = Attention(config, options)
        self.post_norm = RMSNorm(config.hidden_size, config, dtype=options.dtype)
        self.mlp = Mlp(config, options)

    def __call__(
        self, hidden: Float[Array, "B S E"], positions: Int[Array, "B S"], attend: Attend
    ) -> Float[Array, "B S E"]:
        """The whole layer; `attend` decides what its queries see."""
        return self.complete(hidden, attend(*self.project(hidden, positions)))

    def project(
        self, hidden: Float[Array, "B S E"], positions: Int[Array, "B S"]
    ) -> tuple[Float[Array, "B S H D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
        """Queries, keys and values of a hidden state; queries and keys rotated."""
        return self.attention.project(self.input_norm(hidden), positions)

    def query(
        self, hidden: Float[Array, "B S E"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H D"]:
        """The queries of `project` alone."""
        return self.attention.query(self.input_norm(hidden), positions)

    def complete(
        self, hidden: Float[Array, "B S E"], heads: Float[Array, "B S H D"]
    ) -> Float[Array, "B S E"]:
        """The layer's output, given its input and its attended heads."""
        hidden = hidden + self.attention.output(heads)
        return hidden + self.mlp(self.post_norm(hidden))


class Transformer(nnx.Module):
    """A decoder of any family with its embedding and head.

    A fresh model draws kernels and embeddings from N(0, 0.02²), zero biases and unit norms, like
    HF; without `rngs` kernels are zeros. `Transformer.abstract` gives the same tree of shapes
    without memory, to load weights into.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str = "bfloat16",
        rngs: nnx.Rngs | None,
        out_first: bool = False,
        target: Target | None = None,
        shardings: Shardings = ONE_DEVICE,
    ) -> None:
        """`target`: what the model's calls are compiled for; None: the default device.
        `shardings`: whether its layers compute a part each on several devices."""
        target = target or Target.here()
        self.config = config
        self.out_first = out_first
        self.target = target
        self.shardings = shardings
        options = ModuleOptions(dtype, rngs, out_first, target, shardings)
        table = (config.vocab_size, config.hidden_size)
        in_first = options._replace(out_first=False)
        self.embedding = _kernel(table, in_first)
        self.layers = nnx.List([Layer(config, options) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config, dtype=dtype)
        if not config.tie_word_embeddings:
            self.head = _kernel(table, in_first)

    @classmethod
    def abstract(cls, config: ModelConfig, **options: Any) -> Transformer:
        """The module tree with `jax.ShapeDtypeStruct` in place of every array.

        `options`: those of a model, but `rngs`.
        """
        model: Transformer = nnx.eval_shape(lambda: cls(config, rngs=None, **options))
        return model

    @property
    def dtype(self) -> jnp.dtype:
        """The parameters' element type, and that of hidden states."""
        return jnp.dtype(self.final_norm.weight.get_value().dtype)

    @property
    def int8(self) -> bool:
        """Whether kernels, embedding and head are of int8: see `weights.rounded`."""
        return hasattr(self, "embedding_scale")

    def embed(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
        """The hidden state that enters the first layer."""
        rows: Array = self.embedding[...][tokens]
        scale = getattr(self, "embedding_scale", None)
        if scale is None:
            return rows
        wide: Array = rows.astype(jnp.float32) * scale[...][tokens][..., None]
        return wide.astype(self.dtype)

    def logits(self, hidden: Float[Array, "B S E"]) -> Float[Array, "B S V"]:
        """Final norm and head, float32."""
        name = "embedding" if self.config.tie_word_embeddings else "head"
        scale = getattr(self, f"{name}_scale", None)
        return matmul(
            self.final_norm(hidden), getattr(self, name)[...], True, self.target,
            scale=None if scale is None else scale[...],
        )  # fmt: skip


def _linear(
    module: Attention | Mlp, x: Float[Array, "B S I"], name: str, *, partial: bool = False
) -> Float[Array, "B S O"]:
    """A projection of `module` in float32, with the bias of that name if it has one.

    `partial`: where the model is split, `x` is some of the inputs, and the outputs are summed.
    """
    kernel: Array = getattr(module, f"{name}_kernel")[...]
    scale = getattr(module, f"{name}_kernel_scale", None)
    out = matmul(
        x, kernel, module.out_first, module.target, scale=None if scale is None else scale[...]
    )
    if partial:
        out = module.shardings.sum(out)
    if not hasattr(module, f"{name}_bias"):
        return out
    wide: Array = getattr(module, f"{name}_bias")[...].astype(jnp.float32)
    return out + wide[None, None, :]


def _bias(size: int, dtype: str) -> nnx.Param[Array]:
    return nnx.Param(jnp.zeros((size,), dtype))


def _kernel(shape: tuple[int, int], options: ModuleOptions) -> nnx.Param[Array]:
    dtype, out_first = options.dtype, options.out_first
    if options.rngs is None:  # the values are not needed; drawing them is most of making a model
        return nnx.Param(jnp.zeros(shape[::-1] if out_first else shape, dtype))
    draw = jax.random.normal(options.rngs.params(), shape, jnp.float32) * _INIT_SCALE
    return nnx.Param((draw.T if out_first else draw).astype(dtype))


# -- products --------------------------------------------------------------------------------------

_FEW_ROWS = range(9, 65)  # rows for which a CPU wants an out-first weight in blocks
_OUT_BLOCK = 128
_WIDE_BYTES = 4 * 2**20  # of a weight of int8, widened, at a time


def matmul(
    x: Float[Array, "B S I"],
    weight: Float[Array, "I O"] | Float[Array, "O I"] | Int8[Array, "O I"],
    out_first: bool,
    target: Target,
    scale: Float32[Array, " O"] | None = None,
) -> Float[Array, "B S O"]:
    """`x` times a weight `[I, O]`, or `[O, I]` if `out_first`; accumulated and left in float32.

    `scale`: what one is worth in each output of a weight of int8.

    On a CPU the native kernels multiply up to `most_rows` rows of bfloat16: one in half of XLA's
    time.
    """
    on_cpu, rows = target.platform == "cpu", x.shape[0] * x.shape[1]
    sixteen_bit = on_cpu and out_first and x.dtype == jnp.bfloat16
    if sixteen_bit and 0 < rows <= most_rows(int8=scale is not None):
        of_int8 = () if scale is None else (scale,)
        out: Array = dispatch("multiply_rows", "auto", IMPLEMENTATIONS, target, x, weight, *of_int8)
        return out
    if scale is None:
        return _by_xla(x, weight, out_first, on_cpu=on_cpu, widens=target.widens)
    return _widened(x, weight, on_cpu=on_cpu, widens=target.widens) * scale[None, None, :]


def _by_xla(x: Array, weight: Array, out_first: bool, *, on_cpu: bool, widens: bool) -> Array:
    """Shapes are dressed up for XLA's CPU matmul of 16-bit numbers: one row becomes two (a
    matrix-vector product is 15 times slower), a few rows meet the weight in blocks of
    outputs, for which XLA repacks the rows and not the weight (1.1 to 1.7 times faster), and many
    are widened on a CPU without instructions for them (1.4 to 1.6 times faster, `Target.widens`).
    None of this changes what is computed. A widened weight is in memory for as long as its product.
    """
    rows, wide = x.shape[0] * x.shape[1], x.dtype == jnp.float32
    if rows == 1 and not wide:
        pair = jnp.broadcast_to(x, (1, 2, x.shape[2]))
        return _by_xla(pair, weight, out_first, on_cpu=on_cpu, widens=widens)[:, :1]
    if rows >= _FEW_ROWS.stop and widens:
        return _product(x.astype(jnp.float32), weight.astype(jnp.float32), out_first)
    in_blocks = rows in _FEW_ROWS and weight.shape[0] % _OUT_BLOCK == 0
    if out_first and on_cpu and not wide and in_blocks:
        blocked = weight.reshape(-1, _OUT_BLOCK, weight.shape[1])
        out = einsum("bsi,noi->nbso", x, blocked)
        return jnp.moveaxis(out, 0, 2).reshape(*x.shape[:2], -1)
    return _product(x, weight, out_first)


def _widened(x: Array, weight: Array, *, on_cpu: bool, widens: bool) -> Array:
    """Times a weight of int8, which is exact in x's dtype. On a CPU in blocks of outputs: what is
    widened stays in its caches and is no fresh memory in every call (5 to 9 times faster)."""
    outputs, inputs = weight.shape
    least = -(-outputs * inputs * x.dtype.itemsize // _WIDE_BYTES)

    def product(part: Array) -> Array:
        return _by_xla(x, part.astype(x.dtype), True, on_cpu=on_cpu, widens=widens)

    if not on_cpu or least == 1:
        return product(weight)
    whole = outputs // least * least  # the last outputs of a vocabulary that no blocks divide
    out = jax.lax.map(product, weight[:whole].reshape(least, -1, inputs))  # [blocks, B, S, O']
    out = jnp.moveaxis(out, 0, 2).reshape(*x.shape[:2], -1)
    return out if whole == outputs else jnp.concatenate([out, product(weight[whole:])], axis=2)


def _rows_by_xla(x: Array, weight: Array, scale: Array | None = None) -> Array:
    if scale is None:
        return _by_xla(x, weight, True, on_cpu=True, widens=False)
    return _widened(x, weight, on_cpu=True, widens=False) * scale[None, None, :]


IMPLEMENTATIONS: Mapping[str, Kernel] = MappingProxyType(
    {
        "cpu": Kernel(lambda: multiply_rows, platform="cpu"),
        "reference": Kernel(lambda: _rows_by_xla),
    }
)
"""Of rows of bfloat16 on a CPU, times weights [O, I]."""


def _product(x: Array, weight: Array, out_first: bool) -> Array:
    return einsum("bsi,oi->bso" if out_first else "bsi,io->bso", x, weight)


def einsum(subscripts: str, a: Array, b: Array) -> Array:
    """Accumulated in float32; float32 inputs are multiplied as such, not as TF32 or bfloat16."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)
