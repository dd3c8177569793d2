"""Reading a prefix's digest: record after record, checked, put together over its segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np
import tensorstore as ts

from ckv_jax.storage.digest.data import DigestData, landmark_arrays, turn
from ckv_jax.storage.errors import StoreError
from ckv_jax.storage.layout import LANDMARKS, PQ_CODES, PQ_PARTS, Layout
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment import crc
from ckv_jax.storage.segment.deadline import Deadline
from ckv_jax.storage.segment.reads import Run
from ckv_jax.storage.segment.segment import Opened, Segment

_WINDOW_BYTES = 16 << 20  # of pieces of records that are read at once


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the bytes of one part of a layer's record go.

    Attributes:
      memory: uint8 [n]; takes bytes [skip, skip + n) of the part.
      skip: bytes of the part that belong to tokens before the run.
      start: where the part starts within the record.
      size: bytes of the part.
    """

    memory: np.ndarray
    skip: int
    start: int
    size: int

    def take(self, data: np.ndarray, at: int) -> np.ndarray:
        """Copy what `data`, the record from `at` on, has of this part, and return all of it."""
        low = max(self.start, at)
        piece = data[low - at : max(low, min(self.start + self.size, at + len(data))) - at]
        first = low - self.start - self.skip  # in memory
        begin, end = max(0, first), min(len(self.memory), first + len(piece))
        if begin < end:
            self.memory[begin:end] = piece[begin - first : end - first]
        return piece


def read_digest(
    prefix: Prefix,
    runs: list[Run],
    deadline: Deadline,
    prove: Callable[[Opened, int, int], bool],
) -> DigestData | None:
    """Read and check the digests of all runs; None when any of it is bad or missing.

    Segments that were made around other parameters than the first are brought to its own, so that
    one softmax may span all of them. `prove(segment, row, part)` reports what is proven to be bad.
    """
    layout, tokens = prefix.layout, prefix.num_tokens
    rows = len(layout.digest_layers)
    shape, unit = (rows, tokens, layout.num_kv_heads), layout.digest_unit
    codes = np.empty((rows, -(-tokens // unit), shape[2], layout.digest_codes), np.uint8)
    scaled = layout.digest in ("int8", "int4")
    scale = np.empty(shape if scaled else (rows, 0, 0), np.float32)
    params = np.empty((rows, layout.digest_params), np.float32)
    mixed = False
    for run in runs:
        _, segment, start, end = run
        found = params if not start else np.empty_like(params)
        parts = (found, scale[:, start:end], codes[:, start // unit : -(-end // unit)])
        bad = _read_run(run, layout, parts, deadline)
        if bad:  # once more before the segment is given up
            bad = _read_run(run, layout, parts, deadline)
        if bad or isinstance(segment, StoreError):
            all(prove(segment, row, part) for row, part in bad or [(0, 0)])
            return None
        if not np.array_equal(found, params):
            mixed = True
            for row in range(rows):
                turned = turn(layout, parts[2][row], parts[1][row], found[row], params[row])
                parts[2][row], parts[1][row] = turned
    arrays = _arrays(layout, tokens, params, scale, codes)
    for array in arrays.values():
        array.flags.writeable = False
    return DigestData(layout.digest, arrays, mixed)


def _arrays(
    layout: Layout, tokens: int, params: np.ndarray, scale: np.ndarray, codes: np.ndarray
) -> dict[str, np.ndarray]:
    """What `DigestData` says of a layout's kind."""
    if layout.digest in LANDMARKS:
        return landmark_arrays(codes, layout, tokens)
    if layout.digest == "pq":
        books = (layout.num_kv_heads, PQ_PARTS, PQ_CODES, layout.head_dim // PQ_PARTS)
        return {"codes": codes, "codebooks": params.reshape(len(params), *books)}
    return {"codes": codes.view(np.int8) if layout.digest == "int8" else codes, "scale": scale}


def _read_run(
    run: Run, layout: Layout, parts: tuple[np.ndarray, ...], deadline: Deadline
) -> list[tuple[int, int]]:
    """Read one run's (params, scale, codes), each [R, ...]; (row, part) of what is not good."""
    span, segment, _, _ = run
    if isinstance(segment, StoreError):
        return []
    sizes = layout.digest_record(len(segment.manifest.tokens))
    starts = (0, sizes[0], sizes[0] + sizes[1])
    before = span.first_chunk * layout.chunk_tokens * layout.num_kv_heads
    skips = (0, 4 * before, layout.digest_codes * before // layout.digest_unit)
    found = np.zeros((len(layout.digest_layers), 3), np.uint32)
    for row in range(len(found)):
        for part in range(3):
            found[row, part] = segment.digest_start(row, part)
    for row, at, data in _pieces(segment, layout, sum(sizes), deadline):
        if data is None:
            return [(row, part) for part in range(3)]
        for part, array in enumerate(parts):
            memory = array[row].reshape(-1).view(np.uint8)
            target = _Target(memory, skips[part], starts[part], sizes[part])
            piece = crc.as_bytes(target.take(data, at)[None])[0]
            found[row, part] = google_crc32c.extend(int(found[row, part]), piece)
    differ = np.argwhere(found != segment.manifest.digest_crc)
    return [(int(row), int(part)) for row, part in differ]


def _pieces(
    segment: Segment, layout: Layout, record: int, deadline: Deadline
) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """(row, offset in its record, bytes) in order; None for bytes that could not be read."""
    step = segment.manifest.arrays["digest"].inner[1]
    places = [(r, at) for r in range(len(layout.digest_layers)) for at in range(0, record, step)]
    ahead = max(1, _WINDOW_BYTES // step)
    for first in range(0, len(places), ahead):
        window = places[first : first + ahead]
        buffers = [np.empty(min(step, record - at), np.uint8) for _, at in window]
        size = sum(len(b) for b in buffers)
        deadline.admit(size, "reading a digest")
        with ts.Batch() as batch:
            reads = [
                segment.begin_digest(row, at, buffer, batch)
                for (row, at), buffer in zip(window, buffers, strict=True)
            ]
        deadline.watch(reads, size)
        for (row, at), buffer, read in zip(window, buffers, reads, strict=True):
            yield row, at, buffer if deadline.wait(read, "reading a digest") else None
