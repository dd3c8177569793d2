"""Finding stored segments, and hurting them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ckv_jax.storage import ChunkStore, Layout, Prefix
from tests.support.truth import FINGERPRINT

ALIKE = Layout(
    num_layers=2, num_kv_heads=2, head_dim=32, pack_layers=1, probe="none", digest="means",
    heads_apart=True, grouping="alike",
)  # fmt: skip


def segment_folder(folder: Path, prefix: Prefix, span: int = 0) -> Path:
    """Where a span's segment lies in the store in `folder`."""
    id_ = prefix.spans[span].segment_id
    return folder / "segments" / id_[:2] / id_


def hurt(path: Path, place: int) -> None:
    """Flip a bit of a byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def find(store: ChunkStore, tokens: np.ndarray, layout: Layout, **more: bool) -> Prefix:
    """The longest stored prefix of `tokens`."""
    return store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=layout, **more)


def write(
    store: ChunkStore, layout: Layout, tokens: np.ndarray, kv: np.ndarray,
    parent: Prefix | None = None, block: int = 64,
) -> Prefix:  # fmt: skip
    """Stores KV [L, 2, n, K, D] of some tokens, a block at a time."""
    with store.writer(
        fingerprint=FINGERPRINT, layout=layout, tokens=tokens, parent=parent
    ) as writer:
        for start in range(0, len(tokens), block):
            writer.write(start, kv[:, :, start : start + block])
        return writer.commit()
