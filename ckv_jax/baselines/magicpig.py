"""MagicPIG: tokens sampled by locality-sensitive hashing (`magicpig`).

Chen et al. 2025 (arXiv 2410.16179). A query attends to the tokens that share its hash in at least
two of 150 tables, each of 10 bits. How likely that was is known from the angle between query and
key, and every sampled token is weighed by the inverse of it, so that the sum over samples is that
of full attention on average. Each query head has samples of its own.

- Hashes: signs of products of a layer's centred keys with random directions, per KV head. Every
  token's hashes are compared with the query's; the authors' tables list the tokens of each hash.
- Memory: the hashes are made of the stored packs when a prefix is first generated over, and stay in
  memory with all keys and values, as in the paper. So only the ends are read from the SSD, and the
  budget counts for the question alone: bits and tables say how many tokens are sampled.
- Layers 0 and 16 are dense, as in the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ckv_jax.baselines.decoding import (
    ENDS,
    Estimate,
    Estimating,
    Selected,
    Setting,
    in_every_layer,
    indexed,
    lru,
    with_estimate,
)
from ckv_jax.config import OwnParts
from ckv_jax.decode.selection import DecodeSelections
from ckv_jax.decode.token import DecodeContext
from ckv_jax.decode.window import RowSelector, Window
from ckv_jax.model.config import ModelConfig
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix


class HashTables(NamedTuple):
    """One layer of a prefix, padded like its probe."""

    keys: Array
    """[T, K, D], as are values, in the layout's dtype."""
    values: Array
    mean: Array
    """Of the keys, float32 [K, D]."""
    codes: Array
    """uint16 [L, T, K]: the hash of each centred key in each table."""
    planes: Array
    """float32 [D, L * bits]."""
    dense: Array
    """Whether every token counts as sampled, always."""


def sampling(
    bits: int = 10, tables: int = 150, dense: Container[int] = (0, 16)
) -> Callable[[DecodeContext], DecodeSelections]:
    """For `OwnParts.decoding`: `tables` hash tables of `bits` bits each. With 0 bits every token is
    sampled, which is full attention. In `dense` layers every token is attended to.

    Raises `ValueError` for more than 16 bits or fewer than 2 tables.
    """
    if not 0 <= bits <= 16 or tables < 2:
        raise ValueError(
            f"got bits={bits}, tables={tables}, expected at most 16 bits and 2 or more tables"
        )
    return indexed(
        Estimating, EndsAlone, make=partial(tables_of, bits=bits, tables=tables, dense=dense),
        keep=lru, add=partial(sampled, bits=bits), see=with_estimate,
    )  # fmt: skip


def tables_of(
    config: ModelConfig, opened: OpenPrefix, layer: int, keys: np.ndarray, values: np.ndarray, *,
    bits: int, tables: int, dense: Container[int],
) -> HashTables:  # fmt: skip
    """The tables of a layer's keys and values float32 [M, C, K, D]."""
    _, size, heads, dim = keys.shape
    flat = keys.reshape(-1, heads, dim)
    mean = flat[: opened.prefix.num_tokens].mean(axis=0)
    planes = np.random.default_rng(layer).normal(size=(dim, tables * bits)).astype(np.float32)
    more = ((0, opened.probe_chunks * size - len(flat)), (0, 0), (0, 0))
    dtype = opened.prefix.layout.numpy_dtype
    kinds = [np.pad(kind.reshape(flat.shape), more).astype(dtype) for kind in (keys, values)]
    codes = hashes(jnp.asarray(flat - mean), jnp.asarray(planes), tables)
    codes = jnp.pad(codes.transpose(2, 0, 1), ((0, 0), *more[:2]))
    return HashTables(
        jnp.asarray(kinds[0]), jnp.asarray(kinds[1]), jnp.asarray(mean), codes,
        jnp.asarray(planes), jnp.asarray(layer in dense),
    )  # fmt: skip


class EndsAlone(DecodeSelections):
    """Packs are attended to at the ends of a prefix alone."""

    def row(self, limit: int, digest: Digest, window: Window) -> RowSelector:
        prefix = window.opened.prefix
        ends = ENDS.most(prefix.layout, prefix.num_tokens)
        return super().row(min(limit, ends), digest, window)


@partial(jax.jit, static_argnames="tables")
def hashes(rows: Array, planes: Array, tables: int) -> Array:
    """Hashes uint16 [..., L] of rows float32 [..., D]: a bit for each plane's side."""
    bits = planes.shape[1] // tables
    signs = (rows @ planes > 0).reshape(*rows.shape[:-1], tables, bits)
    worth = 2 ** jnp.arange(bits, dtype=jnp.uint32)
    return jnp.sum(jnp.where(signs, worth, 0), axis=-1, dtype=jnp.uint32).astype(jnp.uint16)


def log_chance(cosine: Array, bits: int, tables: int) -> Array:
    """Log of how likely two vectors of this cosine share a hash in two tables or more."""
    alike = (1 - jnp.arccos(jnp.clip(cosine, -1, 1)) / math.pi) ** bits  # in one table
    others = tables - 1
    # 1 - (1 - a)^L - L a (1 - a)^(L - 1), which float32 takes for 0 where a is small
    below = others * jnp.log1p(-jnp.minimum(alike, 1 - 1e-7)) + jnp.log1p(others * alike)
    return jnp.log(jnp.maximum(-jnp.expm1(below), 1e-12))


def sampled(selected: Selected, index: HashTables, setting: Setting, *, bits: int) -> Estimate:
    """Attention of a prefix's rows to sampled tokens outside of their selection."""
    q, (tokens, heads, dim) = selected.q, index.keys.shape
    rows, tables = len(q), len(index.codes)
    wide = q.reshape(rows, heads, -1, dim).astype(jnp.float32)
    keys, values = (kind.astype(jnp.float32) for kind in (index.keys, index.values))
    codes = hashes(wide, index.planes, tables)  # [R, K, G, L]

    def count(shared: Array, table: tuple[Array, Array]) -> tuple[Array, None]:
        ours, theirs = table  # [R, K, G], [T, K]
        same = ours[..., None] == theirs.T[None, :, None, :]
        return shared + same.astype(jnp.int32), None

    none = jnp.zeros((*wide.shape[:3], tokens), jnp.int32)
    shared, _ = lax.scan(count, none, (jnp.moveaxis(codes, -1, 0), index.codes))
    products = jnp.einsum("rkgd,tkd->rkgt", wide, keys)
    centred = products - jnp.einsum("rkgd,kd->rkg", wide, index.mean)[..., None]
    size = jnp.linalg.norm(wide, axis=-1)[..., None]
    size = size * jnp.linalg.norm(keys - index.mean[None], axis=-1).T[None, :, None, :]
    chance = log_chance(centred / jnp.maximum(size, 1e-12), bits, tables)
    taken = jnp.zeros((rows, selected.scores.shape[2] + 1), bool)
    ids = jnp.where(selected.ids[:, 0] < 0, taken.shape[1] - 1, selected.ids[:, 0])
    taken = taken.at[jnp.arange(rows)[:, None], ids].set(True)[:, :-1]
    at = jnp.arange(tokens, dtype=jnp.int32)
    left = ~taken[:, at // setting.chunk_tokens] & (at < selected.num_tokens)[None]
    everyone = index.dense | (bits == 0)
    seen = left[:, None, None, :] & (everyone | (shared >= 2))
    logits = products / math.sqrt(dim) - jnp.where(everyone, 0.0, chance)
    logits = jnp.where(seen, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(lse > -jnp.inf, lse, 0.0)[..., None])
    out = jnp.einsum("rkgt,tkd->rkgd", weights, values)
    return Estimate(out.reshape(q.shape), lse.reshape(q.shape[:3]))


MAGICPIG = in_every_layer(
    "magicpig",
    chunk_tokens=16,
    digest="means",
    own=OwnParts(decoding=sampling()),
)
