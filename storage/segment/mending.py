"""Putting what is proven bad right in the segment where it lies, and nothing else.

The one change that a published segment ever sees. It is safe at every moment without a second
copy: only bytes that have failed their checksum, or belong to a digest that has, are written over,
so a write that is torn, lost or overtaken leaves them as useless as they were. Then one rename
brings a manifest with their new checksums, as KV that is computed again may differ from what was
lost in its last bits. Whoever still reads by the old manifest gets a miss.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from ckv_jax.storage.codec import Codec, encoded
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment import crc
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.packing import aligned, block_keys, pack
from ckv_jax.storage.segment.segment import Segment

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
    if not 0 <= first_chunk < prefix.num_chunks or layout.num_chunks(end) > starts[which + 1]:
        raise ValueError(
            f"first_chunk: got {first_chunk} with {kv.shape[2]} tokens, expected chunks of one "
            f"segment; they start at {starts[:-1].tolist()}, of {prefix.num_chunks}"
        )
    if end % layout.chunk_tokens and end != prefix.num_tokens:
        raise ValueError(f"kv: got {kv.shape[2]} tokens, expected whole chunks")
    span = prefix.spans[which]
    return span, first_chunk - int(starts[which]) + span.first_chunk


def mend(
    files: Files, segment: Segment, first: int, kv: np.ndarray, codec: Codec | None
) -> tuple[Manifest, int]:
    """Write again what is proven bad of some chunks; the caller is the only one who mends.

    Args:
      files: where the segment lies.
      segment: held open.
      first: first chunk, counted within the segment.
      kv: [L, 2, t, K, D] of the layout's numpy_dtype, in stored order: whole chunks from `first`
        on, or up to the segment's end.
      codec: the layout's.

    Returns:
      The manifest that holds now, and how many packs and chunks of probes were written.

    Raises:
      StoreUnavailable: something can neither be read nor proven bad, or not be written. What was
        good is as it was.
    """
    manifest = segment.manifest
    layout, old_id = manifest.layout, manifest.segment_id
    count = layout.num_chunks(kv.shape[2])
    packs = pack(
        kv.view(layout.disk_dtype), layout, aligned(count * layout.groups * layout.pack_bytes)
    )
    stored = [encoded(codec, data, group, layout) for group, data in enumerate(packs)]
    tables = {"packs": manifest.pack_crc.copy(), "probe": manifest.probe_crc.copy()}
    parts: Pieces = defaultdict(dict)

    def consider(kind: str, row: int, chunk: int, data: np.ndarray) -> None:
        if segment.reread(kind, row, chunk) is not None:
            return
        view = crc.as_bytes(np.ascontiguousarray(data).reshape(1, -1))[0]
        tables[kind][row, chunk] = crc.checksum(crc.seed(old_id, kind), row, chunk, view)
        shard, offset = segment.locate(kind, row, chunk)
        parts[kind, shard][offset] = view.tobytes()

    for at in range(count):
        for group in range(layout.groups):
            consider("packs", group, first + at, stored[group][at])
        ct = layout.chunk_tokens
        tokens = slice(at * ct, min((at + 1) * ct, kv.shape[2]))
        for row, layer in enumerate(layout.probe_layers):
            keys = block_keys(packs, layer, layout)[tokens, : layout.probe_heads]
            consider("probe", row, first + at, keys)
    changes = {"pack_crc": tables["packs"], "probe_crc": tables["probe"]}
    return write_pieces(files, segment, parts, changes), sum(
        len(pieces) for pieces in parts.values()
    )


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
