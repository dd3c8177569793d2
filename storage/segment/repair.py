"""Repair of a segment in place: rewrites what is proven bad, and nothing else.

The one change that a published segment ever sees. It is safe at every moment without a second
copy: only bytes that have failed their checksum, or belong to a digest that has, are written over,
so a write that is torn, lost or overtaken leaves them as useless as they were. Then one rename
brings a manifest with their new checksums, as KV that is computed again may differ from what was
lost in its last bits. A reader that still has the old manifest gets a miss.

Packs need a model. Probes and digests do not: they are keys, whole or compressed, and packs hold
all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ckv_jax.storage.codec import Codec, decoded, encoded
from ckv_jax.storage.digest import DigestWriter
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.layout import order_of, run_chunks
from ckv_jax.storage.place.files import Files
from ckv_jax.storage.prefix import Prefix, Span
from ckv_jax.storage.segment.alike import recover_assignment
from ckv_jax.storage.segment.arrays import (
    aligned,
    block_keys,
    check_kv,
    key_places,
    on_disk,
    pack,
)
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.segment import Segment

_BLOCK_BYTES = 32 << 20  # of packs that are read at once
Writes = dict[tuple[str, int], dict[int, bytes]]
"""Bytes to be written to shards, by (kind, shard) and by offset in its file."""


def locate(prefix: Prefix, first_chunk: int, kv: np.ndarray) -> tuple[Span, int]:
    """The span that `kv` belongs to, and its first chunk there; see `ChunkStore.replace_packs`.
    Raises ValueError for what is no run of whole chunks of one segment."""
    layout = prefix.layout
    starts = np.cumsum([0, *(span.num_chunks for span in prefix.spans)])
    which = int(np.searchsorted(starts, first_chunk, side="right")) - 1
    check_kv(kv, layout)
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


def repair_packs(
    files: Files, segment: Segment, first: int, kv: np.ndarray, codec: Codec | None
) -> tuple[Manifest, int]:
    """Write again what is proven bad of some chunks; the caller is the only one who repairs.

    Args:
      first: first chunk, counted within the segment; of a run, where tokens are grouped.
      kv: [L, 2, t, K, D] of the layout's numpy_dtype, in stored order, or by position where tokens
        are grouped: whole chunks from `first` on, or up to the segment's end.

    Returns:
      The manifest that holds now, and how many packs, chunks of probes and rows of an assignment
      were written.

    Raises:
      StoreUnavailable: something can neither be read nor proven bad, or not be written. What was
        good is as it was.
      SegmentDamaged: which tokens packs hold is unknown.
    """
    manifest = segment.manifest
    kv, alike = kv.view(manifest.layout.disk_dtype), manifest.layout.alike
    made = _grouped(segment, first, kv) if alike else _by_position(segment, first, kv, codec)
    after = _with_own_tables(manifest)
    parts: Writes = {}
    for kind, row, column, data in made:
        if segment.reread(kind, row, column) is None:
            _put(segment, after, kind, row, column, data, parts)
    return _write(files, segment, parts, after)


def _with_own_tables(manifest: Manifest) -> Manifest:
    """The same with tables of its own, to be changed."""
    return replace(manifest, tables={kind: t.copy() for kind, t in manifest.tables.items()})


def _put(
    segment: Segment,
    after: Manifest,
    kind: str,
    row: int,
    column: int,
    data: np.ndarray,
    parts: Writes,
) -> None:
    """Put a piece that is to be written into `parts`, and what proves it into `after`."""
    piece = np.array(data).reshape(1, -1).view(np.uint8)  # a copy, which is sealed
    after.seal.seal(kind, np.array([row]), np.array([column]), piece)
    shard, offset, _ = segment.locate(kind, row, column)
    parts.setdefault((kind, shard), {})[offset] = piece.tobytes()


def _by_position(
    segment: Segment, first: int, kv: np.ndarray, codec: Codec | None
) -> Iterator[tuple[str, int, int, np.ndarray]]:
    """(kind, row, chunk, data) of what `kv` makes of chunks from `first` on."""
    layout = segment.manifest.layout
    count, size = layout.num_chunks(kv.shape[2]), layout.chunk_tokens
    packs = pack(kv, layout, aligned(count * layout.groups * layout.pack_bytes))
    stored = [
        on_disk(encoded(codec, data, layout), group, layout) for group, data in enumerate(packs)
    ]
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

    An assignment is written as it was, or not at all, and so are packs of tokens that it names.
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
        found, certain = recover_assignment(segment, total, lambda group: of(group)[0])
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


def _write(files: Files, segment: Segment, parts: Writes, after: Manifest) -> tuple[Manifest, int]:
    """Write `parts` where they belong, then the manifest that holds after it; returns that, and how
    many pieces there were."""
    for (kind, shard), pieces in parts.items():
        spec = segment.manifest.arrays[kind]
        size, index = spec.file_bytes(shard), spec.index(shard)
        files.overwrite(segment.id, spec.files[shard], size, pieces | {size - len(index): index})
    data, checksum = after.encode()
    if checksum != segment.checksum:
        files.put_manifest(segment.id, data)
    return after, sum(len(pieces) for pieces in parts.values())


def rebuild(
    files: Files,
    segment: Segment,
    inherit: Callable[[], np.ndarray | None],
    codec: Codec | None,
) -> tuple[Manifest, int]:
    """Make probes and the digest of a segment again, as far as they are proven bad.

    What follows from a pack that is bad itself stays as it is. The caller is the only one who
    repairs the segment. `inherit`: digest parameters float32 [R, digest_params] of a segment that
    this one continues, or that continues it, asked for where its own are lost; None: new ones are
    made.

    Returns the manifest that holds now, and how many chunks of probes and layers of digests were
    written. Raises StoreUnavailable where something can neither be read nor proven bad, or not be
    written.
    """
    parts: Writes = {}
    after = _with_own_tables(segment.manifest)
    _probes(segment, after, parts, codec)
    _digest(segment, after, inherit, parts, codec)
    return _write(files, segment, parts, after)


def _probes(segment: Segment, after: Manifest, parts: Writes, codec: Codec | None) -> None:
    """Put bad chunks of probes into `parts`, and what proves them into `after`."""
    manifest, layout = segment.manifest, segment.manifest.layout
    ct = layout.chunk_tokens
    for row, layer in enumerate(layout.probe_layers):
        groups, _ = key_places(layer, layout)
        for chunk in range(manifest.chunks):
            if segment.reread("probe", row, chunk) is not None:
                continue
            packs = np.empty((layout.groups, 1, *layout.pack_shape), layout.disk_dtype)
            if not all(_read_packs(segment, group, chunk, packs[group], codec) for group in groups):
                continue
            tokens = min(ct, len(manifest.tokens) - chunk * ct)
            keys = block_keys(packs, layer, layout)[:tokens, : layout.probe_heads]
            _put(segment, after, "probe", row, chunk, keys, parts)


def _digest(
    segment: Segment,
    after: Manifest,
    inherit: Callable[[], np.ndarray | None],
    parts: Writes,
    codec: Codec | None,
) -> None:
    """Put bad layers of the digest into `parts`, and what proves them into `after`."""
    manifest, table = segment.manifest, after.tables["digest"]
    rows = [
        row
        for row in range(len(table))
        if any(segment.reread("digest", row, part) is None for part in range(3))
    ]
    if not rows:
        return
    params = segment.digest_params()
    if params is None and manifest.layout.digest_params:
        # Other parameters make other codes, of all layers.
        params, rows = inherit(), list(range(len(table)))
    try:
        fresh, records = _encode(segment, params, codec)
    except SegmentDamaged:
        return
    record = sum(manifest.layout.digest_record(len(manifest.tokens)))
    for row in rows:
        table[row] = fresh[row]
        shard, offset, _ = segment.locate("digest", row, 0)
        parts.setdefault(("digest", shard), {})[offset] = records[row, :record].tobytes()


def _encode(
    segment: Segment, params: np.ndarray | None, codec: Codec | None
) -> tuple[np.ndarray, np.ndarray]:
    """What proves the digest of a segment's packs, as in `Manifest.tables`, and its records on
    disk, uint8 [R, X]. Raises SegmentDamaged where one of those is bad."""
    manifest, layout = segment.manifest, segment.manifest.layout
    draft = _with_own_tables(manifest)
    spec = manifest.arrays["digest"]
    memory = np.zeros(spec.entries * spec.entry_bytes, np.uint8)

    def put(entry: int, data: np.ndarray, offset: int) -> None:
        start = entry * spec.entry_bytes + offset
        memory[start : start + data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def get(entry: int, out: np.ndarray) -> None:
        group, first = divmod(entry, manifest.chunks)
        if not _read_packs(segment, group, first, out, codec):
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
    table = draft.tables["digest"]
    return table, memory.reshape(len(table), -1)


def _read_packs(
    segment: Segment, group: int, first: int, out: np.ndarray, codec: Codec | None
) -> bool:
    """Read packs from chunk `first` on into `out` [n, *pack]; False where one of them is bad."""
    layout = segment.manifest.layout
    for at in range(len(out)):
        data = segment.reread("packs", group, first + at)
        if data is None:
            return False
        stored = np.zeros((1, *layout.stored_shape), layout.stored_dtype)
        stored.reshape(-1).view(np.uint8)[: len(data)] = data
        out[at] = decoded(codec, stored, layout).view(layout.disk_dtype)[0]
    return True
