"""KV that is a pure function of tokens and positions: what is read can be told right or wrong.

Every element depends on its token, its position in the prefix, layer, kind, head and dim: KV of
another prefix, another place or another moment never passes for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckv_jax.storage import ChunkStore, DigestData, Fingerprint, Layout, Prefix, PrefixReader
from ckv_jax.storage.prefix import ProbePages
from ckv_jax.storage.segment.arrays import aligned

FINGERPRINT = Fingerprint({"weights": "truth", "dtype": "bits"})
SMALL = Layout(num_layers=4, num_kv_heads=2, head_dim=8, pack_layers=2, probe="keys")
"""Few bytes and yet several shards, groups and a probe."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What reading a whole prefix gave: packs that were right, were refused, or were wrong."""

    right: int
    refused: int
    wrong: int


def some_tokens(count: int, seed: int = 0) -> np.ndarray:
    """int32 [count]."""
    return np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)


def kv_of(layout: Layout, tokens: np.ndarray, first: int = 0) -> np.ndarray:
    """[L, 2, t, K, D] of layout.numpy_dtype for `tokens` [t] at positions `first` and on."""
    heads = layout.num_kv_heads * layout.head_dim
    place = np.arange(first, first + len(tokens), dtype=np.uint64)
    seed = tokens.astype(np.uint64) * np.uint64(2654435761) + place * np.uint64(40503)
    row = np.arange(layout.num_layers * 2, dtype=np.uint64)[:, None] * np.uint64(7919)
    base = (seed[None] + row)[..., None] + np.arange(heads, dtype=np.uint64) * np.uint64(104729)
    mixed = (base ^ (base >> np.uint64(15))) * np.uint64(2246822519)
    shape = (layout.num_layers, 2, len(tokens), layout.num_kv_heads, layout.head_dim)
    if layout.dtype == "float32":
        values = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        return values.reshape(shape)
    # Keep exponents moderate: finite numbers, so that digests of them make sense.
    bits = (mixed >> np.uint64(8)).astype(np.uint16) & np.uint16(0xBFFF)
    return bits.view(layout.numpy_dtype).reshape(shape)


def stored_kv(kv: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`kv` [L, 2, T, K, D] in stored order: [T], or [L, T] of each layer."""
    by_layer = np.broadcast_to(order, (len(kv), kv.shape[2]))
    return np.take_along_axis(kv, by_layer[:, None, :, None, None], axis=2)


def digest_keys(digest: DigestData) -> np.ndarray:
    """float32 [R, T, K, D]: the keys as an int4 or pq digest knows them, less the mean for int4."""
    codes = digest.arrays["codes"]
    if digest.kind == "pq":
        row, _, head, half = np.ix_(*map(range, (len(codes), 1, *codes.shape[2:])))
        keys = digest.arrays["codebooks"][row, head, half, codes]
        return keys.reshape(*codes.shape[:3], -1)
    nibbles = np.concatenate([codes & 15, codes >> 4], -1).astype(np.int8) - np.int8(8)
    return nibbles * digest.arrays["scale"][..., None]


def ingest(
    store: ChunkStore,
    tokens: np.ndarray,
    *,
    layout: Layout = SMALL,
    salt: str = "",
    block: int = 512,
    order: np.ndarray | None = None,
) -> Prefix:
    """Store what is not stored yet of `tokens`, as an engine does; returns the prefix. `order`:
    [T], or [L, T] of each layer."""
    found = store.longest_prefix(tokens, fingerprint=FINGERPRINT, layout=layout, salt=salt)
    if found.num_tokens == len(tokens):
        return found
    found = found.whole_chunks()
    rest = tokens[found.num_tokens :]
    kv = kv_of(layout, rest, found.num_tokens)
    if order is not None:
        order = np.broadcast_to(order, (layout.num_layers, len(rest)))
        kv = stored_kv(kv, order)
    with store.writer(
        fingerprint=FINGERPRINT, layout=layout, tokens=rest, parent=found, salt=salt, order=order
    ) as writer:
        for start in range(0, len(rest), block):
            writer.write(start, kv[:, :, start : start + block])
        return writer.commit()


def packs_of(layout: Layout, tokens: np.ndarray, group: int, order: np.ndarray) -> np.ndarray:
    """[M, *pack]: what the packs of a group must hold for `tokens` stored in `order`, [T], [L, T]
    of each layer, or [groups, T] of alike tokens."""
    if layout.alike:
        order = order[group]
    chunks = layout.num_chunks(len(tokens))
    kv = stored_kv(kv_of(layout, tokens), order)
    full = np.zeros((layout.num_layers, 2, chunks * layout.chunk_tokens, *kv.shape[3:]), kv.dtype)
    full[:, :, : len(tokens)] = kv
    layers = layout.group_layers(group)
    part = full[layers.start : layers.stop, ..., layout.group_heads(group), :]
    if not layout.kv_together:
        part = part[:, group % 2 : group % 2 + 1]
    shape = (*part.shape[:2], chunks, layout.chunk_tokens, *part.shape[3:])
    packs = np.zeros((chunks, *layout.pack_shape), kv.dtype)
    packs[:, : len(layers)] = part.reshape(shape).transpose(2, 0, 1, 3, 4, 5)
    return packs


def read_probe(reader: PrefixReader, layer: int, out: np.ndarray) -> int:
    """Read the probe keys of `layer` into `out` [T, K', D], a chunk a page; how many leading tokens
    are good. The rest of `out` is zero."""
    pages = ProbePages(reader.prefix, 1)
    size = reader.prefix.layout.chunk_tokens * pages.token_bytes
    memory = aligned(-(-len(pages) * size // 4096) * 4096)[: len(pages) * size]
    rows = memory.reshape(len(pages), size)
    good = reader.read_probe_pages(layer, pages, np.arange(len(pages)), rows)
    tokens = int(pages.tokens[: len(pages) if good.all() else good.argmin()].sum())
    keys = rows.reshape(-1).view(out.dtype).reshape(-1, *out.shape[1:])
    at = 0
    for start, count in zip(pages.start, pages.tokens, strict=True):
        out[start : start + count] = keys[at : at + count]
        at += reader.prefix.layout.chunk_tokens
    out[tokens:] = 0
    return tokens


def read_all(store: ChunkStore, prefix: Prefix) -> Outcome:
    """Read every pack of a prefix and compare it, bit for bit, with what it must be."""
    layout, bits = prefix.layout, prefix.layout.disk_dtype
    right = refused = wrong = 0
    if not prefix.num_chunks:
        return Outcome(0, 0, 0)
    with store.reader(prefix) as reader:
        ids = np.arange(prefix.num_chunks)
        memory = aligned(len(ids) * layout.pack_bytes)  # as an engine's, fit for direct reads
        out = memory.view(layout.numpy_dtype).reshape(len(ids), *layout.pack_shape)
        for group in range(layout.groups):
            good = reader.read_packs(group, ids, out)
            truth = packs_of(layout, prefix.tokens, group, reader.order)
            same = (out.view(bits) == truth.view(bits)).reshape(len(ids), -1).all(1)
            blank = (out.view(bits) == 0).reshape(len(ids), -1).all(1)
            right += int((good & same).sum())
            refused += int((~good & blank).sum())
            wrong += int((good & ~same).sum() + (~good & ~blank).sum())
    return Outcome(right, refused, wrong)
