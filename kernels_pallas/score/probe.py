"""Probes, the arrays that chunks are scored against, and their preparation for the kernels.

A probe is the keys, a compressed copy of them, or landmarks of chunks. Turned keys are for a coarse
pass on a CPU: the keys of a head differ along few directions (Loki, Singhania et al. 2024, arXiv
2406.02542), and in the basis of their principal components the first dimensions say nearly as much
as all of them. A CPU multiplies int8 as it is in memory; the nibbles of int4 it decodes first,
which takes longer than all the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int8, Int32, UInt, UInt8

_EVERY = 8  # one token in so many decides about the basis of turned keys
_LEVELS = 127


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
class Int4Keys:
    """key ~ scale * (nibble - 8), up to a mean key per head that softmax does not see; the low
    nibble is dim d, the high nibble dim d + D/2."""

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
    """Padded where there are fewer codes."""

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
    other probes by `turn`."""

    codes: Int8[Array, "K T R"]
    scale: Float32[Array, "K T"]
    basis: Float32[Array, "K D R"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, K, D)."""
        heads, dim, _ = self.basis.shape
        return self.codes.shape[1], heads, dim


TokenProbe = Keys | Int4Keys | PqKeys
"""Probes with one key per token."""
Landmarks = MeanKeys | BoundKeys
"""Probes with one entry per chunk."""


Probe = TokenProbe | Landmarks | TurnedKeys


def weights_of(q_lengths: Array, queries: int, peaks: bool) -> Array:
    """What each query counts, float32 [B, S]: 0 past its row's length, else 1, or with `peaks`
    1 / (1 + d) for the query d places before the last."""
    before_end = q_lengths[:, None] - jnp.arange(queries, dtype=jnp.int32)[None, :]  # 1 + d
    valid = before_end > 0
    if not peaks:
        return valid.astype(jnp.float32)
    return jnp.where(valid, 1.0 / jnp.maximum(before_end, 1).astype(jnp.float32), 0.0)


def valid_queries(q: Array, q_lengths: Array) -> Array:
    """q [B, S, H, D], with zeros for queries past their length, whatever they were."""
    valid = jnp.arange(q.shape[1], dtype=jnp.int32)[None, :] < q_lengths[:, None]  # [B, S]
    return jnp.where(valid[:, :, None, None], q, jnp.zeros((), q.dtype))


def of_chunks(probe: Probe, ids: Array, chunk_tokens: int) -> Probe:
    """What a probe has of the chunks `ids` int32 [n], one after the other; for -1, of some."""
    unit = 1 if isinstance(probe, Landmarks) else chunk_tokens

    def taken(array: Array) -> Array:
        rows = array.reshape(-1, unit, *array.shape[1:])
        found = jnp.take(rows, ids, axis=0, mode="clip")
        return found.reshape(-1, *array.shape[1:])

    if isinstance(probe, PqKeys):
        return PqKeys(taken(probe.codes), probe.codebooks)
    few: Probe = jax.tree.map(taken, probe)
    return few


@partial(jax.jit, static_argnames="dims")
def turn(probe: Int4Keys, *, dims: int) -> TurnedKeys:
    """The first `dims` principal components of a probe's keys, a KV head at a time."""

    def of_head(head: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        codes, scale = head  # [T, D/2], [T]
        low, high = codes & jnp.uint8(15), codes >> jnp.uint8(4)
        keys = jnp.concatenate([low, high], axis=1).astype(jnp.float32) - 8.0
        keys = keys * scale[:, None]
        some = keys[::_EVERY]
        _, basis = jnp.linalg.eigh(_turned_dot(some, some, (0, 0)))  # ascending
        basis = basis[:, -dims:]
        return (*whole_numbers(_turned_dot(keys, basis, (1, 0))), basis)

    codes, unit, basis = lax.map(of_head, (probe.codes.swapaxes(0, 1), probe.scale.T))
    return TurnedKeys(codes, unit, basis)


def _turned_dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    dims = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)


def whole_numbers(values: Array) -> tuple[Array, Array]:
    """float32 [..., R] as int8, and what one is worth in each row, float32 [...]."""
    unit = jnp.max(jnp.abs(values), axis=-1) / _LEVELS
    inverse = jnp.where(unit > 0, 1.0 / jnp.where(unit > 0, unit, 1.0), 0.0)
    return jnp.rint(values * inverse[..., None]).astype(jnp.int8), unit
