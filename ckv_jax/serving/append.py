"""Append: what a generation computed becomes part of the stored prefix it stood on."""

from __future__ import annotations

import numpy as np

from ckv_jax.ingest import read_kv
from ckv_jax.pipeline.prefill import DensePrefill
from ckv_jax.serving.generation import Completion
from ckv_jax.storage.fingerprint import Fingerprint
from ckv_jax.storage.layout import Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.store import ChunkStore


def append(
    completion: Completion,
    *,
    store: ChunkStore,
    prefill: DensePrefill,
    fingerprint: Fingerprint,
    layout: Layout,
    salt: str,
) -> Prefix:
    """Stores prefix, suffix and generated tokens as one prefix; only a segment is written.

    The parent must end on a whole chunk: a partial last chunk is written again at the start of
    the new segment. Raises `ValueError` if the generation's KV was not kept.
    """
    if completion.kv is None:
        raise ValueError("got a generation without its KV, expected one with keep_kv=True")
    placed = completion.placed
    tokens = np.concatenate([placed.tokens, completion.token_ids])
    stored = store.longest_prefix(tokens, fingerprint=fingerprint, layout=layout, salt=salt)
    if stored.num_tokens == len(tokens):
        return stored
    before = placed.prefix.num_tokens
    whole = min(stored.num_tokens, before) // layout.chunk_tokens * layout.chunk_tokens
    parent = None
    if whole:
        parent = store.longest_prefix(
            tokens[:whole], fingerprint=fingerprint, layout=layout, salt=salt
        )
        whole = parent.num_tokens
    kv = completion.kv
    if whole < before:  # the partial last chunk, or what the store has lost since
        first = whole // layout.chunk_tokens
        kv = np.concatenate(
            [
                read_kv(store, placed.prefix, prefill, first_chunk=first),
                kv.view(layout.numpy_dtype),
            ],
            axis=2,
        )
    with store.writer(
        fingerprint=fingerprint,
        layout=layout,
        tokens=tokens[whole:],
        parent=parent if whole else None,
        salt=salt,
    ) as writer:
        writer.write(0, np.ascontiguousarray(kv).view(layout.numpy_dtype))
        return writer.commit()
