"""Long prefixes whose KV is written straight by the store's writer: no prefill is waited for.

A warm run has them in every layout that systems want: where two layouts have the same packs and
differ in what lies beside them alone (probe keys, a digest), the second one's pack files are hard
links to the first one's: 64 prefixes of 5,000 tokens are 18 GB in each.

Keys and values are what every layer makes of the tokens' embeddings alone. With the structured
weights of `bench.structured` these carry the features that queries weigh, so that what a query
selects has the same statistics as after a prefill; what earlier layers would have added is missing.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.lab import Lab, reorders
from bench.structured import TOPICS
from ckv_jax import Engine
from ckv_jax.config import SystemConfig
from ckv_jax.pipeline.layers import Layers
from ckv_jax.storage.codec import codec_of
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix

BLOCK = 2048
"""Tokens written at a time."""


def stored(engine: Engine, tokens: np.ndarray) -> Prefix:
    """Stores `tokens` int32 [T], unless they are stored."""
    layout, layers = engine.layout, engine.layers
    found = engine.store.longest_prefix(tokens, fingerprint=engine.fingerprint, layout=layout)
    if found.num_tokens == len(tokens):
        return found
    with engine.store.writer(
        fingerprint=engine.fingerprint, layout=layout, tokens=tokens, codec=engine.system.coder
    ) as writer:
        for first, kv in blocks(layers, layout, tokens):
            writer.write(first, kv)
        return writer.commit()


def blocks(layers: Layers, layout: Layout, tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """First token and KV [L, 2, t, K, D] of every block of `tokens` int32 [T], in the layout's
    dtype."""
    row = layout.num_kv_heads, layout.head_dim
    for first in range(0, len(tokens), BLOCK):
        block = np.zeros((1, BLOCK), np.int32)
        part = tokens[first : first + BLOCK]
        block[0, : len(part)] = part
        hidden = layers.embed(block)
        kv = np.empty((layers.num_layers, 2, len(part), *row), layout.numpy_dtype)
        for layer in range(layers.num_layers):
            both = _keys_values(
                layers.state(layer), hidden, np.int32(first), layer_of=layers.layer_of
            )
            for which, found in enumerate(both):
                kv[layer, which] = np.asarray(found)[0, : len(part)]
        yield first, kv


def walking_tokens(rng: np.random.Generator, n: int, vocab_size: int, *, stay: float) -> np.ndarray:
    """Token ids int32 [n] of a text that keeps to its topic with probability `stay` a token."""
    topics = np.empty(n, np.int64)
    topic = rng.integers(TOPICS)
    for i in range(n):
        if rng.random() >= stay:
            topic = rng.integers(TOPICS)
        topics[i] = topic
    ids: np.ndarray = TOPICS * rng.integers(0, vocab_size // TOPICS, n) + topics
    return ids.astype(np.int32)


@partial(jax.jit, static_argnames="layer_of")
def _keys_values(
    state: Any, hidden: Array, first: Array, *, layer_of: Callable[[Any], Any]
) -> tuple[Array, Array]:
    at = first + jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]
    _, keys, values = layer_of(state).project(hidden, at)
    return keys, values


REORDERED = 0.7
"""The share of the prefixes that IMPRESS may come to hold in a second order as well: those that
are asked four times."""
PROBED = 1.25
"""Bytes of such a prefix over those of its KV: a probe of a quarter of the keys, and some room."""
SPARE = 1 << 30


def store_prefixes(lab: Lab, indices: Iterable[int], systems: Sequence[SystemConfig]) -> int:
    """Stores prefixes in the layouts of all `systems`; bytes that they take on disk.

    Raises SystemExit, before anything is written, where the disk has no room for them.
    """
    indices = sorted(set(indices))
    layouts = list({layout.hex: layout for layout in map(lab.layout, systems)}.values())
    _check_room(lab, len(indices), layouts, any(map(reorders, systems)))
    for number, index in enumerate(indices):
        _store(lab, index, layouts)
        if number % 8 == 7:
            print(f"stored {number + 1} of {len(indices)} prefixes", flush=True)
    files = [file.stat() for file in (lab.folder / "store").rglob("*") if file.is_file()]
    return sum({stat.st_ino: 512 * stat.st_blocks for stat in files}.values())


def _store(lab: Lab, index: int, layouts: Sequence[Layout]) -> None:
    tokens, base = lab.work.prefix(index), lab.base
    by_packs: dict[Layout, Prefix] = {}
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                lab.store.writer(
                    fingerprint=base.fingerprint, layout=layout, tokens=tokens,
                    codec=codec_of(layout),
                )
            )
            for layout in layouts
        ]  # fmt: skip
        for first, kv in blocks(base.layers, base.layout, tokens):
            for writer in writers:
                writer.write(first, kv)
        for layout, writer in zip(layouts, writers, strict=True):
            prefix = writer.commit()
            link_packs(lab, by_packs.setdefault(_bare(layout), prefix), prefix)
            lab.put(index, prefix)


def _bare(layout: Layout) -> Layout:
    """The same packs with nothing beside them."""
    return dataclasses.replace(layout, probe="none", probe_width=1, digest="none", digest_layers=())


def link_packs(lab: Lab, first: Prefix, other: Prefix) -> None:
    """The pack files of `other` become those of `first`, which has the same packs.

    What is wrong about that would fail the checksums that `other` has of each of its packs.
    """
    if first is other:
        return
    for one, two in zip(first.spans, other.spans, strict=True):
        theirs = _segment(lab, two.segment_id) / "packs"
        for file in sorted((_segment(lab, one.segment_id) / "packs").glob("c.*")):
            there = theirs / file.name
            if there.stat().st_size != file.stat().st_size:
                raise RuntimeError(f"{there} is not as large as {file}, expected the same packs")
            new = there.with_suffix(".link")
            os.link(file, new)
            new.replace(there)


def _segment(lab: Lab, name: str) -> Path:
    [found] = (lab.folder / "store" / "segments").glob(f"*/{name}")
    return found


def _check_room(lab: Lab, prefixes: int, layouts: Sequence[Layout], reorders: bool) -> None:
    kinds = len({_bare(layout) for layout in layouts})
    beside = sum(_beside(lab, layout) for layout in layouts)
    need = prefixes * (kinds * lab.kv_bytes + beside) + SPARE
    if reorders:
        need += int(REORDERED * prefixes * PROBED * lab.kv_bytes)
    free = shutil.disk_usage(lab.folder).free
    if free < need:
        raise SystemExit(
            f"got {free / 1e9:.0f} GB free on the disk of {lab.folder}, expected {need / 1e9:.0f}: "
            "take another --folder, or fewer --prefixes"
        )


def _beside(lab: Lab, layout: Layout) -> int:
    """Bytes of probe keys and digest of one prefix."""
    tokens = lab.work.prefix_tokens
    row = layout.probe_heads * layout.head_dim * layout.numpy_dtype.itemsize
    probe = len(layout.probe_layers) * tokens * row if layout.probe != "none" else 0
    digest = sum(layout.digest_record(layout.num_chunks(tokens) * layout.chunk_tokens))
    return probe + digest * len(layout.digest_layers)
