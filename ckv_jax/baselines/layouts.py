"""How packs of the published systems lie on disk, for `OwnParts.layout`."""

from __future__ import annotations

from dataclasses import replace

from ckv_jax.storage.layout import TOGETHER, Layout


def heads_apart(layout: Layout, num_heads: int) -> Layout:
    """Each KV head has packs of its own, and selects by its own queries."""
    if layout.digest == "none":
        raise ValueError("got packs of one head without a digest, expected one")
    return replace(layout, heads_apart=True)


def clusters(layout: Layout, num_heads: int) -> Layout:
    """As `heads_apart`, of tokens whose keys are alike to a layer's KV head (KVDrive §4). A text's
    first 16 and last 64 tokens are in chunks of their own."""
    if layout.digest not in ("means", "means+cosines") or layout.chunk_tokens % TOGETHER:
        raise ValueError(
            f"got digest={layout.digest!r} and chunk_tokens={layout.chunk_tokens}, expected mean "
            f"keys and a multiple of {TOGETHER}"
        )
    return replace(layout, heads_apart=True, grouping="alike")


def kv_apart(layout: Layout, num_heads: int) -> Layout:
    """Keys and values of a layer are a read each."""
    return replace(layout, kv_together=False)


def with_keys(layout: Layout, num_heads: int) -> Layout:
    """All keys of the first layer of every pack in an array of their own."""
    return replace(layout, probe="keys")
