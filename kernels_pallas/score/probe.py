"""What chunks are scored against: the keys themselves, or one of three compressed copies."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array
from jaxtyping import Float, Float32, Int8, UInt, UInt8

__all__ = ["Int4Keys", "Int8Keys", "Keys", "PqKeys", "Probe"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Keys:
    """Keys as computed, RoPE applied; or the bit patterns of keys in the queries' dtype."""

    keys: Float[Array, "T K D"] | UInt[Array, "T K D"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, K, D)."""
        tokens, heads, dim = self.keys.shape
        return tokens, heads, dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Int8Keys:
    """key ~ scale * code, up to a mean key a head that softmax does not see."""

    codes: Int8[Array, "T K D"]
    scale: Float32[Array, "T K"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, K, D)."""
        tokens, heads, dim = self.codes.shape
        return tokens, heads, dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Int4Keys:
    """key ~ scale * (nibble - 8); the low nibble is dim d, the high nibble dim d + D/2."""

    codes: UInt8[Array, "T K D2"]
    scale: Float32[Array, "T K"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, K, D)."""
        tokens, heads, half = self.codes.shape
        return tokens, heads, 2 * half


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PqKeys:
    """Product quantisation: sub-vector m of a key ~ codebooks[head, m, code]."""

    codes: UInt8[Array, "T K Msub"]
    codebooks: Float32[Array, "K Msub 256 Dsub"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, K, D)."""
        tokens, heads, subspaces = self.codes.shape
        return tokens, heads, subspaces * self.codebooks.shape[-1]


Probe = Keys | Int8Keys | Int4Keys | PqKeys
