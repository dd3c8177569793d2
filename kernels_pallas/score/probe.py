"""Probes, the arrays that chunks are scored against, and their preparation for the kernels.

A probe is the keys, a compressed copy of them, or landmarks of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, UInt, UInt8


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


TokenProbe = Keys | Int4Keys | PqKeys
"""Probes with one key per token."""
Landmarks = MeanKeys | BoundKeys
"""Probes with one entry per chunk."""


Probe = TokenProbe | Landmarks


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


_JOINED_BYTES = 8 << 20
"""Most bytes of codes that are copied to be scored by one call. An H200 copies 2.6 MB in 35 µs, and
its host saves about 10 kernels of 5 to 8 µs. So at 8 MiB, by this estimate, the copy costs more."""


def as_heads(probes: Sequence[Probe]) -> Int4Keys | None:
    """Joins the probes of several layers to one of a layer with all their KV heads, one layer's
    after the other's, which a GPU scores in one call.

    None: they are not int4 keys of one shape, or too large to be copied.
    """
    int4 = [probe for probe in probes if isinstance(probe, Int4Keys)]
    if len(int4) < len(probes) or any(probe.shape != int4[0].shape for probe in int4):
        return None
    if sum(probe.codes.size for probe in int4) > _JOINED_BYTES:
        return None
    return Int4Keys(
        jnp.concatenate([probe.codes for probe in int4], axis=1),
        jnp.concatenate([probe.scale for probe in int4], axis=1),
    )
