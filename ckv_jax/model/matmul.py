"""Matrix products that accumulate in float32, in the shapes a CPU is fastest at."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

from ckv_jax.kernels_pallas.native.library import few_rows, most_rows
from ckv_jax.kernels_pallas.target import Kernel, Target, dispatch

__all__ = ["IMPLEMENTATIONS", "einsum", "matmul"]

_FEW_ROWS = range(9, 65)  # rows for which a CPU wants an out-first weight in blocks
_LONG = 1536  # inputs from which it does for fewer as well, unless each follows the other by pages
_PAGE = 2048  # 16-bit numbers of 4 KiB
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

    On a CPU the native kernels multiply a few rows of bfloat16: one in half of XLA's time.
    """
    on_cpu, rows = target.platform == "cpu", x.shape[0] * x.shape[1]
    sixteen_bit = on_cpu and out_first and x.dtype == jnp.bfloat16
    if sixteen_bit and 0 < rows <= most_rows(int8=scale is not None):
        of_int8 = () if scale is None else (scale,)
        out: Array = dispatch("few_rows", "auto", IMPLEMENTATIONS, target, x, weight, *of_int8)
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
    if out_first and on_cpu and not wide and _in_blocks(rows, *weight.shape):
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


def _few_by_xla(x: Array, weight: Array, scale: Array | None = None) -> Array:
    if scale is None:
        return _by_xla(x, weight, True, on_cpu=True, widens=False)
    return _widened(x, weight, on_cpu=True, widens=False) * scale[None, None, :]


IMPLEMENTATIONS: Mapping[str, Kernel] = MappingProxyType(
    {"cpu": Kernel(lambda: few_rows, platform="cpu"), "reference": Kernel(lambda: _few_by_xla)}
)
"""Of a few rows of bfloat16 on a CPU, times weights [O, I]."""


def _in_blocks(rows: int, outputs: int, inputs: int) -> bool:
    if outputs % _OUT_BLOCK:
        return False
    return rows in _FEW_ROWS or (rows < _FEW_ROWS.start and inputs >= _LONG and inputs % _PAGE > 0)


def _product(x: Array, weight: Array, out_first: bool) -> Array:
    return einsum("bsi,oi->bso" if out_first else "bsi,io->bso", x, weight)


def einsum(subscripts: str, a: Array, b: Array) -> Array:
    """Accumulated in float32; float32 inputs are multiplied as such, not as TF32 or bfloat16."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)
