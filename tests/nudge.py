"""Rounding of another machine: every product of floats is off by some units in the last place.

How a product is rounded depends on its shapes, as blocks and vectors do; on which processor, it
depends on more. Here the error of each element is a hash of the product's shapes, the element's
index and a seed: a program gives the same bits each time, another batch size gives others.
"""

from __future__ import annotations

import os
import zlib

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import dot_general_p

UNITS = 8
"""Units in the last place of float32 by which an element is off at most, up or down."""
RARE = 64
"""Of so many elements that are narrower than float32, one is off by one of its units."""


def nudge_products() -> None:
    """Every dot product that this process traces from here on is nudged, where CKV_TESTS_NUDGE is
    set: to SEED, or to SEED:UNITS for other than `UNITS`."""
    nudge = os.environ.get("CKV_TESTS_NUDGE")
    if not nudge:
        return
    seed, _, units = nudge.partition(":")
    most = int(units or UNITS)
    exact = dot_general_p.bind

    def bind(*args: jax.Array, **named: object) -> jax.Array:
        out: jax.Array = exact(*args, **named)
        if not jnp.issubdtype(out.dtype, jnp.floating):
            return out
        of = (int(seed), [x.shape for x in args], named["dimension_numbers"])
        return _nudged(out, zlib.crc32(repr(of).encode()), most)

    dot_general_p.bind = bind


def _nudged(out: jax.Array, key: int, most: int) -> jax.Array:
    draw = jnp.full(out.shape, key, jnp.uint32)
    for axis in range(out.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, out.shape, axis)
        draw = (draw ^ place) * jnp.uint32(0x9E3779B1)
        draw ^= draw >> jnp.uint32(15)
    if out.dtype.itemsize < 4:
        off = (draw % jnp.uint32(RARE) == 0).astype(out.dtype)
    else:
        off = (draw % jnp.uint32(2 * most + 1)).astype(out.dtype) - jnp.asarray(most, out.dtype)
    return out + out * (off * jnp.finfo(out.dtype).eps.astype(out.dtype))
