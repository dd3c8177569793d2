"""Putting what is proven bad right in the segment where it lies, and nothing else.

The one change that a published segment ever sees. It is safe at every moment without a second
copy: only bytes that have failed their checksum, or belong to a digest that has, are written over,
so a write that is torn, lost or overtaken leaves them as useless as they were. Then one rename
brings a manifest with their new checksums, as KV that is computed again may differ from what was
lost in its last bits. Whoever still reads by the old manifest gets a miss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ckv_jax.storage.codec import Codec, encoded
from ckv_jax.storage.grouping import order_of, run_chunks
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment import crc
from ckv_jax.storage.segment.assignment import found_again
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.packing import aligned, block_keys, pack
from ckv_jax.storage.segment.segment import TABLES, Segment

Pieces = dict[tuple[str, int], dict[int, bytes]]
"""Bytes of shards, by (kind, shard) and by offset in its file."""


def locate(prefix: Prefix, first_chunk: int, kv: np.ndarray) -> tuple[Span, int]:
    """The span that `kv` belongs to, and its first chunk there; see `ChunkStore.replace_packs`.

    Raises ValueError for what is no run of whole chunks of one segment.
    """
    layout = prefix.layout
    starts = np.cumsum([0, *(span.num_chunks for span in prefix.spans)])
    which = int(np.searchsorted(starts, first_chunk, side="right")) - 1
    shape = (layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    if kv.ndim != 5 or kv.dtype != layout.numpy_dtype or 0 in kv.shape:
        raise ValueError(f"kv: got {kv.dtype} {kv.shape}, expected {layout.numpy_dtype} 5-D")
    if (*kv.shape[:2], *kv.shape[3:]) != shape:
        raise ValueError(f"kv: got shape {kv.shape}, expected {(*shape[:2], 't', *shape[2:])}")
    end = first_chunk * layout.chunk_tokens + kv.shape[2]
    known = 0 <= first_chunk < prefix.num_chunks
    if not known or end > min(starts[which + 1] * layout.chunk_tokens, prefix.num_tokens):
        raise ValueError(
            f"first_chunk: got {first_chunk} with {kv.shape[2]} tokens, expected chunks of one "
            f"segment; they start at {starts[:-1].tolist()}, of {prefix.num_chunks}, for "
            f"{prefix.num_tokens} tokens"
        )
    if end % layout.chunk_tokens and end != prefix.num_tokens:
        raise ValueError(f"kv: got {kv.shape[2]} tokens, expected whole chunks")
    span = prefix.spans[which]
    first = first_chunk - int(starts[which]) + span.first_chunk
    if layout.alike and first % run_chunks(layout.chunk_tokens):
        raise ValueError(f"first_chunk: got {first_chunk}, expected the first one of a run")
    return span, first


def mend(
    files: Files, segment: Segment, first: int, kv: np.ndarray, codec: Codec | None
) -> tuple[Manifest, int]:
    """Write again what is proven bad of some chunks; the caller is the only one who mends.

    Args:
      files: where the segment lies.
      segment: held open.
      first: first chunk, counted within the segment; of a run, where tokens are grouped.
      kv: [L, 2, t, K, D] of the layout's numpy_dtype, in stored order, or by position where tokens
        are grouped: whole chunks from `first` on, or up to the segment's end.
      codec: the layout's.

    Returns:
      The manifest that holds now, and how many packs, chunks of probes and rows of an assignment
      were written.

    Raises:
      StoreUnavailable: something can neither be read nor proven bad, or not be written. What was
        good is as it was.
      SegmentDamaged: it cannot be told which tokens packs hold.
    """
    manifest = segment.manifest
    kv, alike = kv.view(manifest.layout.disk_dtype), manifest.layout.alike
    made = _grouped(segment, first, kv) if alike else _by_position(segment, first, kv, codec)
    tables = {kind: getattr(manifest, TABLES[kind]).copy() for kind in manifest.arrays}
    parts: Pieces = defaultdict(dict)
    for kind, row, column, data in made:
        if segment.reread(kind, row, column) is not None:
            continue
        view = crc.as_bytes(np.ascontiguousarray(data).reshape(1, -1))[0]
        seed = crc.seed(manifest.segment_id, kind)
        tables[kind][row, column] = crc.checksum(seed, row, column, view)
        shard, offset = segment.locate(kind, row, column)
        parts[kind, shard][offset] = view.tobytes()
    changes = {TABLES[kind]: table for kind, table in tables.items()}
    count = sum(len(pieces) for pieces in parts.values())
    return write_pieces(files, segment, parts, changes), count


def _by_position(
    segment: Segment, first: int, kv: np.ndarray, codec: Codec | None
) -> Iterator[tuple[str, int, int, np.ndarray]]:
    """(kind, row, chunk, data) of what `kv` makes of chunks from `first` on."""
    layout = segment.manifest.layout
    count, size = layout.num_chunks(kv.shape[2]), layout.chunk_tokens
    packs = pack(kv, layout, aligned(count * layout.groups * layout.pack_bytes))
    stored = [encoded(codec, data, layout) for data in packs]
    for at in range(count):
        for group in range(layout.groups):
            yield "packs", group, first + at, stored[group][at]
        tokens = slice(at * size, min((at + 1) * size, kv.shape[2]))
        for row, layer in enumerate(layout.probe_layers):
            keys = block_keys(packs, layer, layout)[tokens, : layout.probe_heads]
            yield "probe", row, first + at, keys


def _grouped(
    segment: Segment, first: int, kv: np.ndarray
) -> Iterator[tuple[str, int, int, np.ndarray]]:
    """The same of alike tokens, `kv` by position: of chunks all of whose tokens are in it, and of
    the assignment where it has all tokens of the segment.

    An assignment is written as it was, or not at all, and so are packs of tokens that it tells.
    """
    manifest, layout = segment.manifest, segment.manifest.layout
    size, total = layout.chunk_tokens, len(manifest.tokens)
    start, end, run = first * size, first * size + kv.shape[2], run_chunks(size)
    last = min(manifest.chunks, -(-layout.num_chunks(end) // run) * run)

    def of(group: int) -> np.ndarray:
        """KV [2, t, D]."""
        return kv[layout.group_layers(group)[0], :, :, layout.group_heads(group)][:, :, 0]

    rows = dict(enumerate(map(segment.assignment_row, range(layout.groups))))
    if kv.shape[2] == total:
        found, certain = found_again(segment, total, lambda group: of(group)[0])
        rows = {group: found[group] if certain[group] else None for group in rows}
    for group, row in rows.items():
        if row is None:
            continue
        if kv.shape[2] == total:
            yield "assignment", group, 0, row
        order, mine = order_of(row[None], size)[0], of(group)
        for chunk in range(first, last):
            tokens = order[chunk * size : min((chunk + 1) * size, total)]
            if tokens.max() < end:
                data = np.zeros((2, size, layout.head_dim), layout.disk_dtype)
                data[:, : len(tokens)] = mine[:, tokens - start]
                yield "packs", group, chunk, data


def write_pieces(
    files: Files,
    segment: Segment,
    parts: Pieces,
    changes: dict[str, np.ndarray],
) -> Manifest:
    """Write `parts` where they belong; returns the manifest with the `changes` that they make."""
    for (kind, shard), pieces in parts.items():
        spec = segment.manifest.arrays[kind]
        size, index = spec.file_bytes(shard), spec.index(shard)
        files.mend(segment.id, spec.file(shard), size, pieces | {size - len(index): index})
    after = replace(segment.manifest, **changes)  # type: ignore[arg-type]
    data, checksum = after.encode()
    if checksum != segment.checksum:
        files.put_manifest(segment.id, data)
    return after
