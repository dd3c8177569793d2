"""The packs of a segment that is being written, put in groups of alike tokens where they lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckv_jax.storage.digest.data import as_float32
from ckv_jax.storage.grouping import alike, by_position, runs, steady
from ckv_jax.storage.segment import crc
from ckv_jax.storage.segment.array_writer import ArrayWriter
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.packing import aligned


def regroup(
    draft: Manifest,
    packs: ArrayWriter,
    assignment: ArrayWriter,
    step: Callable[[int, int], None],
) -> None:
    """Groups the tokens of every layer and KV head, and writes down which chunk each is in.

    A run of one head is in memory at a time. Its tokens keep their order within a chunk.

    Args:
      draft: its checksums are those of the packs as they lie after this.
      packs: has all packs, their tokens by position.
      assignment: is filled.
      step: told of each run, how many are done and of how many, so that a long text is not taken
        for a disk that does nothing.
    """
    layout, size = draft.layout, draft.layout.chunk_tokens
    first, stop = steady(draft.first_chunk * size, len(draft.tokens), size)
    parts = list(runs(first, stop, size))
    ungrouped = by_position(len(draft.tokens), size)
    seed = crc.seed(draft.segment_id, "assignment")
    for group in range(layout.groups):
        chunk_of = ungrouped.copy()
        for number, (start, end) in enumerate(parts, 1):
            unit = _regroup_run(draft, packs, group, start, end)
            chunk_of[start * size : end * size] = chunk_of[start * size] + unit
            step(group * len(parts) + number, layout.groups * len(parts))
        assignment.put(group, chunk_of)
        view = crc.as_bytes(chunk_of[None])[0]
        draft.assignment_crc[group, 0] = crc.checksum(seed, group, 0, view)


def _regroup_run(
    draft: Manifest, packs: ArrayWriter, group: int, start: int, end: int
) -> np.ndarray:
    """Groups the tokens of chunks [start, end) of one group; the unit int32 [n * C] of each."""
    layout, entry = draft.layout, group * draft.chunks + start
    memory = aligned((end - start) * layout.pack_bytes).view(layout.disk_dtype)
    data = memory.reshape(end - start, *layout.pack_shape)  # [n, 1, 2, C, 1, D]
    packs.get(entry, data)
    rows = data[:, 0, :, :, 0].swapaxes(0, 1)  # [2, n, C, D]
    kinds = rows.reshape(2, -1, layout.head_dim)
    unit = alike(as_float32(kinds[0], layout), layout.chunk_tokens)
    rows[...] = kinds[:, np.argsort(unit, kind="stable")].reshape(rows.shape)
    packs.put(entry, data)
    seed = crc.seed(draft.segment_id, "packs")
    draft.pack_crc[group, start:end] = crc.checksums(
        seed, [group] * (end - start), range(start, end), data, range(end - start)
    )
    return unit
