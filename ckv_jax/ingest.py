"""Ingest: compute a text's KV once, in blocks, and stream it to the store as it comes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckv_jax.pipeline.prefill import Block, DensePrefill
from ckv_jax.pipeline.recovery import Recovery
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.writer import SegmentWriter
from ckv_jax.storage.store import ChunkStore

Progress = Callable[[int, int], None]
"""(tokens done, tokens in all)."""


def ingest(
    tokens: np.ndarray,
    *,
    store: ChunkStore,
    prefill: DensePrefill,
    fingerprint: Fingerprint,
    layout: Layout,
    salt: str,
    progress: Progress | None = None,
) -> Prefix:
    """Stores the KV of `tokens` int32 [T], of which only what is not stored yet is computed.

    The disk writes one block while the next is computed. Raises `StoreFull` and other
    `CkvError`s of the store, with nothing half-written left behind.
    """
    stored = store.longest_prefix(tokens, fingerprint=fingerprint, layout=layout, salt=salt)
    if stored.num_tokens == len(tokens):
        return stored
    whole = stored.num_tokens // layout.chunk_tokens * layout.chunk_tokens
    parent = None
    if whole:
        parent = store.longest_prefix(
            tokens[:whole], fingerprint=fingerprint, layout=layout, salt=salt
        )
        whole = parent.num_tokens
    before = read_kv(store, parent, prefill) if parent is not None and whole else None
    with store.writer(
        fingerprint=fingerprint,
        layout=layout,
        tokens=tokens[whole:],
        parent=parent if whole else None,
        salt=salt,
    ) as writer:
        pending: Block | None = None
        for block in prefill.run(tokens[whole:], start=whole, before=before):
            if pending is not None:
                _write(writer, pending, whole, layout)
                _report(progress, pending, len(tokens))
            pending = block
        if pending is not None:
            _write(writer, pending, whole, layout)
            _report(progress, pending, len(tokens))
        return writer.commit()


def read_kv(
    store: ChunkStore, prefix: Prefix, prefill: DensePrefill, *, first_chunk: int = 0
) -> np.ndarray:
    """Keys and values [L, 2, T, K, D] of a stored prefix; what is bad is recomputed.

    T counts from the first token of `first_chunk`.
    """
    layout = prefix.layout
    recovery = Recovery(prefix, prefill)
    chunks = np.arange(first_chunk, prefix.num_chunks)
    size = layout.chunk_tokens
    out = np.empty(
        (layout.num_layers, 2, len(chunks) * size, layout.num_kv_heads, layout.head_dim),
        layout.numpy_dtype,
    )
    packs = np.empty((len(chunks), *layout.pack_shape), layout.numpy_dtype)
    with store.reader(prefix) as reader:
        for group in range(layout.groups):
            ok = reader.read_packs(group, chunks, packs)
            if not ok.all():
                packs[~ok] = recovery.packs(group, chunks[~ok])
            layers = layout.group_layers(group)
            # [M, pl, 2, C, K, D] -> [pl, 2, M * C, K, D]
            rows = packs.transpose(1, 2, 0, 3, 4, 5).reshape(
                layout.pack_shape[0], layout.pack_shape[1], -1, *layout.pack_shape[3:]
            )
            if layout.kv_together:
                out[layers.start : layers.stop] = rows[: len(layers)]
            else:
                out[layers.start, group % 2] = rows[0, 0]
    return out[:, :, : prefix.num_tokens - first_chunk * size]


def _write(writer: SegmentWriter, block: Block, whole: int, layout: Layout) -> None:
    kv = np.asarray(block.kv)[:, :, : block.length].view(layout.numpy_dtype)
    writer.write(block.first - whole, kv)


def _report(progress: Progress | None, block: Block, total: int) -> None:
    if progress is not None:
        progress(block.first + block.length, total)
