"""What chunks are scored against: the keys, a compressed copy of them, or landmarks of chunks."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array
from jaxtyping import Float, Float32, Int8, Int32, UInt, UInt8

__all__ = ["BoundKeys", "Int4Keys", "Int8Keys", "Keys", "Landmarks", "MeanKeys", "PqKeys",
           "Probe", "TokenProbe", "TurnedKeys"]  # fmt: skip


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
    """key ~ scale * code, up to a mean key per head that softmax does not see."""

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class MeanKeys:
    """Every key of a chunk ~ the chunk's mean key."""

    mean: Float[Array, "M K D"]
    log_size: Float32[Array, "M K"]
    """Logarithm of how many keys a mean stands for; -inf: none."""
    oddity: Int32[Array, "M K"] | None = None
    """The chunk's place among its head's, 0: has the key that is least like its mean."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, K, D)."""
        chunks, heads, dim = self.mean.shape
        return chunks, heads, dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class BoundKeys:
    """The least and the greatest value of each dim of a chunk's keys (Quest)."""

    low: Float[Array, "M K D"]
    high: Float[Array, "M K D"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, K, D)."""
        chunks, heads, dim = self.low.shape
        return chunks, heads, dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TurnedKeys:
    """key ~ scale * (basis @ code), up to a mean key per head that softmax does not see; made of
    other probes (`turned.py`)."""

    codes: Int8[Array, "K T R"]
    scale: Float32[Array, "K T"]
    basis: Float32[Array, "K D R"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, K, D)."""
        heads, dim, _ = self.basis.shape
        return self.codes.shape[1], heads, dim


TokenProbe = Keys | Int8Keys | Int4Keys | PqKeys
"""What has a key for each token."""
Landmarks = MeanKeys | BoundKeys
"""What has one entry for each chunk."""


Probe = TokenProbe | Landmarks | TurnedKeys
