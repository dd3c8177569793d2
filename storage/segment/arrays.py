"""Arrays of a segment on disk: packs, checksums, zarr v3 arrays.

A checksum covers content and identity, so that a valid pack in the wrong place is bad: it is the
crc32c of (segment id, kind, row, column) followed by the bytes. For bytes of one length the crc
state is a bijection of its seed, so within a segment no two places share a checksum for equal
content, and across segments they meet with probability 2**-32. Only this module builds the
metadata and the shard indexes of arrays.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import prod
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from ckv_jax.storage.errors import FULL
from ckv_jax.storage.layout import PLAIN, RUN, Layout
from ckv_jax.storage.place.disk import close_descriptor, progress, write_all, write_file

_PAGE = mmap.PAGESIZE
PLACE = struct.Struct("<II")
"""A row and a column."""
_TRIES = 2  # to make room for a write: a disk may be full of what is not ours
MakeRoom = Callable[[int, float], bool]
"""Makes room for so many bytes, which the disk refused after a time of the monotonic clock; whether
another try may help."""
_MISSING = np.uint64(2**64 - 1)
_DIGEST_PIECE = 4 << 20  # bytes of one read of a digest
_READ_AT_ONCE = 64 << 20  # bytes, so that a slow disk is heard of meanwhile


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One zarr array of a segment, split along its first axis only into shard files.

    Inner chunks are stored plain: their checksum is the one in the manifest, which covers their
    place, too. The shard index has zarr's own crc32c.

    Attributes:
      name: folder of the array within the segment.
      data_type: zarr data type on disk.
      shape: shape of the array.
      shard: shape of one shard.
      inner: shape of one inner chunk, the unit of a read.
      entries: inner chunks that are really stored; shard slots past them are marked missing.
      attributes: zarr attributes.
      parts: inner chunks that hold one pack's place together: 2 when keys and values are apart, K
        when heads are.
      rows_together: inner chunks hold one row each, and all rows of a shard at one place of the
        second axis lie side by side: one pack, which is shorter where a last shard has fewer rows.
    """

    name: str
    data_type: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    inner: tuple[int, ...]
    entries: int
    attributes: dict[str, Any]
    parts: int = 1
    rows_together: bool = False

    @cached_property
    def entry_bytes(self) -> int:
        """Bytes of one inner chunk."""
        return prod(self.inner) * np.dtype(self.data_type).itemsize

    @cached_property
    def shard_entries(self) -> int:
        """Slots of one shard's index."""
        return prod(self.shard) // prod(self.inner)

    def rows(self, shard: int) -> int:
        """Rows of the first axis in `shard`."""
        return min(self.shard[0], self.shape[0] - shard * self.shard[0])

    def unit_bytes(self, shard: int) -> int:
        """Bytes of what is written and read as one: an inner chunk, or those of all rows."""
        return self.entry_bytes * (self.rows(shard) if self.rows_together else 1)

    def place(self, entry: int) -> tuple[int, int]:
        """(shard, offset in its file) of what is written as one, counted over all shards."""
        units = self.shape[1] if self.rows_together else self.shard_entries
        shard, slot = divmod(entry, units)
        return shard, slot * self.unit_bytes(shard)

    def stored(self, shard: int) -> int:
        """Inner chunks stored in `shard`."""
        return min(self.shard_entries, self.entries - shard * self.shard_entries)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Path of each shard file within the segment."""
        rest, shards = ".0" * (len(self.shape) - 1), -(-self.shape[0] // self.shard[0])
        return tuple(f"{self.name}/c.{shard}{rest}" for shard in range(shards))

    def file_bytes(self, shard: int) -> int:
        """Exact size of a shard file: entries, index, crc of the index."""
        return self.stored(shard) * self.entry_bytes + 16 * self.shard_entries + 4

    def offsets(self, rows: np.ndarray, columns: np.ndarray) -> tuple[int, np.ndarray]:
        """(shard, int64 [n]): where the inner chunks at `rows` and `columns` int64 [n] lie in their
        shard file.

        A row is a group of layers, or one part of it (`Layout.parts`); all are in one shard.
        """
        row = int(rows[0])
        if self.rows_together:
            return row, columns * self.unit_bytes(row)
        count = self.shard[0] // self.inner[0] * self.parts
        first = rows % count * (self.shard_entries // count)
        return row // count, (first + columns) * self.entry_bytes

    def index(self, shard: int) -> bytes:
        """Encoded shard index: (offset, bytes) of every slot, then the crc32c of that."""
        steps = self.shard[0] // self.inner[0]
        order = np.arange(self.shard_entries, dtype=np.uint64).reshape(steps, self.parts, -1)
        slots = order.transpose(0, 2, 1).reshape(-1)  # zarr order has parts innermost
        if self.rows_together:
            row, column = np.divmod(slots, np.uint64(self.shape[1]))
            held = np.uint64(self.rows(shard))
            slots = np.where(row < held, column * held + row, slots)
        table = np.empty((self.shard_entries, 2), "<u8")
        table[:, 0] = slots * np.uint64(self.entry_bytes)
        table[:, 1] = self.entry_bytes
        table[slots >= self.stored(shard)] = _MISSING
        data = table.tobytes()
        return data + struct.pack("<I", google_crc32c.value(data))

    def encoded(self) -> bytes:
        """The array's zarr.json, for readers other than this package."""
        return json.dumps(self.metadata()).encode()

    def metadata(self) -> dict[str, Any]:
        """zarr v3 metadata of the array."""
        endian = {"name": "bytes", "configuration": {"endian": "little"}}
        plain = {"name": "bytes"} if self.data_type == "uint8" else endian
        sharding = {
            "chunk_shape": list(self.inner),
            "codecs": [plain],
            "index_codecs": [endian, {"name": "crc32c"}],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.shard)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": self.attributes,
        }


def array_specs(layout: Layout, tokens: int) -> dict[str, ArraySpec]:
    """The arrays of a segment of `tokens` tokens, by name: "packs", and "probe", "digest",
    "assignment" if any.

    packs  [L, M, 2, C, K, D], L padded to whole groups but with `short_last`: bit patterns of keys
           and values; with a codec uint8 [groups, M, codec_bytes].
    probe  [P, T, K', D], T padded to whole blocks: full keys of the probe layers, contiguous.
    digest uint8 [R, X]: a record of params, scales and codes for each digest layer, X padded to
           whole pieces.
    assignment uint16 [groups, T]: the chunk of each token, counted in its run.
    """
    chunks = layout.num_chunks(tokens)
    dim, ct = layout.head_dim, layout.chunk_tokens
    disk = layout.disk_dtype.name
    specs = {"packs": _packs(layout, tokens)}
    if layout.probe_layers:
        block = layout.probe_block(chunks)
        blocks = -(-chunks // block)
        rows, ph = len(layout.probe_layers), layout.probe_heads
        specs["probe"] = ArraySpec(
            name="probe",
            data_type=disk,
            shape=(rows, blocks * block * ct, ph, dim),
            shard=(rows, blocks * block * ct, ph, dim),
            inner=(1, block * ct, ph, dim),
            entries=rows * blocks,
            attributes={
                "element_type": layout.dtype,
                "axes": ["probe_layer", "token", "kv_head", "dim"],
                "layers": list(layout.probe_layers),
                "tokens": tokens,
            },
        )
    if layout.digest != "none":
        record = sum(layout.digest_record(tokens))
        piece = min(record, _DIGEST_PIECE)
        pieces = -(-record // piece)
        specs["digest"] = ArraySpec(
            name="digest",
            data_type="uint8",
            shape=(len(layout.digest_layers), pieces * piece),
            shard=(len(layout.digest_layers), pieces * piece),
            inner=(1, piece),
            entries=len(layout.digest_layers) * pieces,
            attributes={
                "kind": layout.digest,
                "layers": list(layout.digest_layers),
                "record": list(layout.digest_record(tokens)),
            },
        )
    if layout.alike:
        specs["assignment"] = ArraySpec(
            name="assignment",
            data_type="uint16",
            shape=(layout.groups, tokens),
            shard=(layout.groups, tokens),
            inner=(1, tokens),
            entries=layout.groups,
            attributes={"axes": ["layer_head", "token"], "run": RUN},
        )
    return specs


def _packs(layout: Layout, tokens: int) -> ArraySpec:
    chunks = layout.num_chunks(tokens)
    if layout.codec != PLAIN:
        size = layout.codec_bytes
        return ArraySpec(
            name="packs",
            data_type="uint8",
            shape=(layout.groups, chunks, size),
            shard=(layout.shard_groups, chunks, size),
            inner=(1, 1, size),
            entries=layout.groups * chunks,
            attributes={"codec": layout.codec, "layers": layout.num_layers, "tokens": tokens},
        )
    heads, dim, ct = layout.num_kv_heads, layout.head_dim, layout.chunk_tokens
    pl, kinds, short = layout.pack_layers, layout.pack_shape[1], layout.short_last
    layers = layout.num_layers if short else -(-layout.num_layers // pl) * pl
    return ArraySpec(
        name="packs",
        data_type=layout.disk_dtype.name,
        shape=(layers, chunks, 2, ct, heads, dim),
        shard=(max(pl, 2), chunks, 2, ct, heads, dim),
        inner=(1 if short else pl, 1, kinds, ct, layout.pack_heads, dim),
        entries=(layers if short else layout.groups) * chunks,
        parts=layout.parts,
        rows_together=short,
        attributes={
            "element_type": layout.dtype,
            "axes": ["layer", "chunk", "keys_values", "token", "kv_head", "dim"],
            "layers": layout.num_layers,
            "tokens": tokens,
        },
    )


class ArrayWriter:
    """The shard files of one array, open for writing; entries may be put by several threads.

    With `direct`, entries of whole pages that lie at the start of a page of memory go past the page
    cache; everything else goes through it. Where the disk has no room for so many bytes, `room` may
    make it; the write is then tried again.
    """

    def __init__(self, folder: Path, spec: ArraySpec, direct: bool, room: MakeRoom) -> None:
        self._spec = spec
        self._room = room
        self._direct: list[int] = []
        self._refused = False
        self._fds: list[int] = []
        (folder / spec.name).mkdir(mode=0o700)
        write_file(folder / spec.name / "zarr.json", spec.encoded())
        try:
            self._open(folder, direct=direct and spec.unit_bytes(0) % _PAGE == 0)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path, *, direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        past = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        for name in self._spec.files:
            path = folder / name
            self._fds.append(os.open(path, flags, 0o600))
            if direct:
                self._direct.append(os.open(path, past))

    def put(self, entry: int, data: np.ndarray, offset: int = 0) -> None:
        """Write contiguous `data` at byte `offset` of an entry, counted over all shards."""
        shard, start = self._spec.place(entry)
        self._put(shard, start + offset, data)

    def _put(self, shard: int, start: int, data: np.ndarray) -> None:
        for _ in range(_TRIES):
            began = time.monotonic()
            try:
                return self._write(shard, start, data)
            except OSError as e:
                if e.errno not in FULL or not self._room(data.nbytes, began):
                    raise
        return self._write(shard, start, data)

    def _write(self, shard: int, start: int, data: np.ndarray) -> None:
        whole = not (start % _PAGE or data.nbytes % _PAGE or data.ctypes.data % _PAGE)
        if self._direct and whole and not self._refused:
            try:
                write_all(self._direct[shard], as_buffer(data), start)
                return
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._refused = True  # other alignment than a page's: through the page cache
        write_all(self._fds[shard], as_buffer(data), start)

    def get(self, entry: int, out: np.ndarray, offset: int = 0) -> None:
        """Read back what `put` wrote from byte `offset` of an entry on, into contiguous `out`."""
        shard, start = self._spec.place(entry)
        view, at = memoryview(as_buffer(out)), start + offset
        while view:
            done = os.preadv(self._fds[shard], [view[:_READ_AT_ONCE]], at)
            if not done:
                raise OSError(f"{self._spec.files[shard]}: ends early")
            view, at = view[done:], at + done
            progress()

    def finish(self, step: Callable[[], None]) -> None:
        """Write the shard indexes and make the bytes durable; `step` is called for each file."""
        for shard in range(len(self._fds)):
            size = self._spec.file_bytes(shard)
            index = np.frombuffer(self._spec.index(shard), np.uint8)
            self._put(shard, size - len(index), index)
        for fd in self._fds:
            os.fsync(fd)
            step()
        self.close()

    def close(self) -> None:
        """Close the files; may be called twice."""
        fds, self._fds, self._direct = self._fds + self._direct, [], []
        for fd in fds:
            close_descriptor(fd)


def as_buffer(data: np.ndarray) -> Any:
    """The bytes of `data`, contiguous, as something that has a buffer."""
    return data.reshape(-1).view(np.uint8)


# -- packs and checksums ---------------------------------------------------------------------------


def check_kv(kv: np.ndarray, layout: Layout) -> None:
    """Raises ValueError for what is no KV [L, 2, t, K, D] of layout.numpy_dtype, t > 0."""
    if kv.ndim != 5 or kv.dtype != layout.numpy_dtype or 0 in kv.shape:
        raise ValueError(f"kv: got {kv.dtype} {kv.shape}, expected {layout.numpy_dtype} 5-D")
    want = (layout.num_layers, 2, "t", layout.num_kv_heads, layout.head_dim)
    if kv.shape != (*want[:2], kv.shape[2], *want[3:]):
        raise ValueError(f"kv: got shape {kv.shape}, expected {want}")


def aligned(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] at the start of a page of memory, as direct I/O wants it."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def pack(kv: np.ndarray, layout: Layout, memory: np.ndarray) -> np.ndarray:
    """[groups, n, *pack] in uint8 `memory`, from bit patterns [L, 2, t, K, D].

    Zeros fill a partial last chunk, and the layers that the last group lacks.
    """
    layers, _, tokens, _, dim = kv.shape
    size, chunks = layout.chunk_tokens, layout.num_chunks(tokens)
    whole = tokens // size
    shape = (layout.groups, chunks, *layout.pack_shape)
    packs = memory[: layout.groups * chunks * layout.pack_bytes].view(kv.dtype).reshape(shape)
    if whole < chunks or layers % layout.pack_layers:
        packs[...] = 0
    for group in range(layout.groups):
        span = layout.group_layers(group)
        part = kv[span.start : span.stop, :, :, layout.group_heads(group)]
        if not layout.kv_together:
            part = part[:, group % 2 : group % 2 + 1]
        out = packs[group, :, : len(span)].transpose(1, 2, 0, 3, 4, 5)  # [pl, kv, n, C, K, D]
        body = part[:, :, : whole * size]
        out[:, :, :whole] = body.reshape(*part.shape[:2], whole, size, layout.pack_heads, dim)
        if whole < chunks:
            out[:, :, whole, : tokens - whole * size] = part[:, :, whole * size :]
    return packs


def on_disk(packs: np.ndarray, group: int, layout: Layout) -> np.ndarray:
    """What packs [n, *stored] of a layer group have on disk, contiguous: themselves, or a copy."""
    held = layout.disk_layers(group)
    if held == layout.pack_layers:
        return packs
    part = packs[:, :held]
    kept = aligned(part.nbytes).view(packs.dtype).reshape(part.shape)
    kept[...] = part
    return kept


def block_keys(packs: np.ndarray, layer: int, layout: Layout) -> np.ndarray:
    """Bit patterns of the keys of one layer, [n * C, K, D], from packs [groups, n, *pack]."""
    groups, row = key_places(layer, layout)
    parts = [packs[group, :, row, 0] for group in groups]  # [n, C, heads of a pack, D] each
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
    return rows.reshape(-1, *rows.shape[2:])


def key_places(layer: int, layout: Layout) -> tuple[range, int]:
    """The groups whose packs hold the keys of a layer, one head after the other where these are
    apart, and their row in such a pack."""
    group, row = divmod(layer, layout.pack_layers)
    first = group * layout.parts
    return range(first, first + (layout.parts if layout.heads_apart else 1)), row


def seed(segment_id: str, kind: str) -> int:
    """Crc state after the segment and the kind of data ("packs", "probe", "digest")."""
    return int(google_crc32c.value(f"{kind}\0{segment_id}".encode()))


def placed(state: int, row: int, column: int) -> int:
    """Crc state at (row, column) after `seed`; what is there extends it to its checksum."""
    return int(google_crc32c.extend(state, PLACE.pack(row, column)))


def _in_python(state: int, data: Any) -> int:
    return int(google_crc32c.extend(state, memoryview(data).tobytes()))


_extend = google_crc32c.extend if google_crc32c.implementation == "c" else _in_python
"""Takes every buffer, which google_crc32c without its C code does not."""


def checksums(
    state: int,
    rows: np.ndarray,
    columns: np.ndarray,
    data: np.ndarray,
    where: np.ndarray | None = None,
) -> np.ndarray:
    """uint32 [n]: checksums of uint8 `data[where]` [_, bytes], of contiguous rows, at rows and
    columns int [n]; without `where`, of `data` [n, bytes]."""
    parts = data[:]
    parts.flags.writeable = False
    places = np.multiply(columns, 1 << 32, dtype=np.int64) + rows  # as `PLACE` has them
    # No call of Python's for a piece: a read job checks dozens.
    states = map(_extend, repeat(state), places)
    pieces = parts if where is None else map(parts.__getitem__, where.tolist())
    return np.fromiter(map(_extend, states, pieces), np.uint32, columns.size)


def as_rows(data: np.ndarray) -> np.ndarray:
    """A view of C-contiguous `data` [n, ...] as uint8 [n, bytes]."""
    return data.reshape(data.shape[0], -1).view(np.uint8)


def as_bytes(data: np.ndarray) -> np.ndarray:
    """The same, read-only."""
    view = as_rows(data)
    view.flags.writeable = False
    return view
