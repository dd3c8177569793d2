"""Probes and digests that are proven bad, made anew from the packs of their own segment.

They are keys, whole or compressed, and packs hold all keys: no model is needed. See `mending.py`
for why this is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ckv_jax.storage.codec import Codec, decoded
from ckv_jax.storage.digest.writer import DigestWriter
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.segment import crc
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.mending import Pieces, write_pieces
from ckv_jax.storage.segment.packing import block_keys, key_places
from ckv_jax.storage.segment.segment import Segment

_BLOCK_BYTES = 32 << 20  # of packs that are read at once


def remake(
    files: Files,
    segment: Segment,
    inherit: Callable[[], np.ndarray | None],
    codec: Codec | None,
) -> tuple[Manifest, int]:
    """Make probes and the digest of a segment anew, as far as they are proven bad.

    What follows from a pack that is bad itself stays as it is.

    Args:
      files: where the segment lies.
      segment: held open; the caller is the only one who mends it.
      inherit: digest parameters float32 [R, digest_params] of a segment that this one continues,
        or that continues it, asked for where its own are lost; None: new ones are made.
      codec: the layout's.

    Returns:
      The manifest that holds now, and how many chunks of probes and layers of digests were written.

    Raises:
      StoreUnavailable: something can neither be read nor proven bad, or not be written.
    """
    parts: Pieces = {}
    probes = _probes(segment, parts, codec)
    digests = _digest(segment, inherit, parts, codec)
    count = sum(len(pieces) for pieces in parts.values())
    changes = {"probe_crc": probes, "digest_crc": digests}
    return write_pieces(files, segment, parts, changes), count


def _probes(segment: Segment, parts: Pieces, codec: Codec | None) -> np.ndarray:
    """Put bad chunks of probes into `parts`; returns the checksums of all."""
    manifest, layout = segment.manifest, segment.manifest.layout
    table, ct = manifest.probe_crc.copy(), layout.chunk_tokens
    seed = crc.seed(segment.id, "probe")
    for row, layer in enumerate(layout.probe_layers):
        groups, _ = key_places(layer, layout)
        for chunk in range(manifest.chunks):
            if segment.reread("probe", row, chunk) is not None:
                continue
            packs = np.empty((layout.groups, 1, *layout.pack_shape), layout.disk_dtype)
            if not all(_read(segment, group, chunk, packs[group], codec) for group in groups):
                continue
            tokens = min(ct, len(manifest.tokens) - chunk * ct)
            keys = block_keys(packs, layer, layout)[:tokens, : layout.probe_heads]
            keys = np.ascontiguousarray(keys)
            data = crc.as_bytes(keys.reshape(1, -1))[0]
            table[row, chunk] = crc.checksum(seed, row, chunk, data)
            shard, offset = segment.locate("probe", row, chunk)
            parts.setdefault(("probe", shard), {})[offset] = data.tobytes()
    return table


def _digest(
    segment: Segment,
    inherit: Callable[[], np.ndarray | None],
    parts: Pieces,
    codec: Codec | None,
) -> np.ndarray:
    """Put bad layers of the digest into `parts`; returns the checksums of all."""
    manifest, table = segment.manifest, segment.manifest.digest_crc
    rows = [
        row
        for row in range(len(table))
        if any(segment.reread("digest", row, part) is None for part in range(3))
    ]
    if not rows:
        return table
    params = segment.digest_params()
    if params is None and manifest.layout.digest_params:
        # Other parameters make other codes, of all layers.
        params, rows = inherit(), list(range(len(table)))
    try:
        fresh, records = _encode(segment, params, codec)
    except SegmentDamaged:
        return table
    table = table.copy()
    record = sum(manifest.layout.digest_record(len(manifest.tokens)))
    for row in rows:
        table[row] = fresh[row]
        shard, offset = segment.locate("digest", row, 0)
        parts.setdefault(("digest", shard), {})[offset] = records[row, :record].tobytes()
    return table


def _encode(
    segment: Segment, params: np.ndarray | None, codec: Codec | None
) -> tuple[np.ndarray, np.ndarray]:
    """Checksums uint32 [R, 3] and records uint8 [R, X] of the digest of a segment's packs.

    Raises SegmentDamaged where one of those is bad.
    """
    manifest, layout = segment.manifest, segment.manifest.layout
    draft = replace(manifest, digest_crc=np.zeros_like(manifest.digest_crc))
    spec = manifest.arrays["digest"]
    memory = np.zeros(spec.entries * spec.entry_bytes, np.uint8)

    def put(entry: int, data: np.ndarray, offset: int) -> None:
        start = entry * spec.entry_bytes + offset
        memory[start : start + data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def get(entry: int, out: np.ndarray) -> None:
        group, first = divmod(entry, manifest.chunks)
        if not _read(segment, group, first, out, codec):
            raise SegmentDamaged(f"segment {segment.id}: some of group {group} is bad")

    writer = DigestWriter(draft, put, params)
    groups = {group for layer in layout.digest_layers for group in key_places(layer, layout)[0]}
    step = max(1, _BLOCK_BYTES // (layout.groups * layout.pack_bytes))
    for first in range(0, manifest.chunks if layout.digest != "pq" else 0, step):
        count = min(step, manifest.chunks - first)
        packs = np.empty((layout.groups, count, *layout.pack_shape), layout.disk_dtype)
        for group in groups:
            get(group * manifest.chunks + first, packs[group])
        at = first * layout.chunk_tokens
        tokens = min(count * layout.chunk_tokens, len(manifest.tokens) - at)
        writer.add(at, packs, tokens)
    writer.finish(get, lambda: None)
    return draft.digest_crc, memory.reshape(len(draft.digest_crc), -1)


def _read(segment: Segment, group: int, first: int, out: np.ndarray, codec: Codec | None) -> bool:
    """Read packs from chunk `first` on into `out` [n, *pack]; False where one of them is bad."""
    layout = segment.manifest.layout
    for at in range(len(out)):
        data = segment.reread("packs", group, first + at)
        if data is None:
            return False
        stored = np.frombuffer(data, np.uint8).view(layout.stored_dtype)
        pack = decoded(codec, stored.reshape(1, *layout.stored_shape), layout)
        out[at] = pack.view(layout.disk_dtype)[0]
    return True
