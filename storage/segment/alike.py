"""Clustering of a segment's tokens as it is written.

KVDrive (§4) and RetroInfer group alike tokens of a layer and KV head into clusters, a segment of
8,192 tokens at a time. Here a cluster is exactly one chunk: tokens that stand side by side in fours
are halved at the median along their principal direction until one chunk of them is left together.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np

from ckv_jax.storage.digest import as_float32
from ckv_jax.storage.layout import TOGETHER, by_position, runs, steady
from ckv_jax.storage.segment.arrays import ArrayWriter, aligned, as_rows, on_disk
from ckv_jax.storage.segment.manifest import Manifest

_LARGEST = np.float32(1e15)
_TINY = np.finfo(np.float32).tiny
_TURNS = 8  # of the power iteration


def alike(keys: np.ndarray, unit_tokens: int) -> np.ndarray:
    """The unit int32 [T] of each token of `keys` [T, D]: of `unit_tokens` alike tokens each. T is a
    multiple of `unit_tokens`, and `unit_tokens` of `TOGETHER`."""
    size = unit_tokens // TOGETHER
    means = keys.reshape(-1, TOGETHER, keys.shape[-1]).mean(1, dtype=np.float32)
    means = np.clip(means, -_LARGEST, _LARGEST)  # else sums of squares may be infinite
    unit = np.empty(len(means), np.int32)
    leaves, found = [np.arange(len(means))] if len(means) else [], 0
    while leaves:
        leaf = leaves.pop()
        if len(leaf) == size:
            unit[leaf] = found
            found += 1
            continue
        below, above = _halves(means, leaf, len(leaf) // size // 2 * size)
        leaves += [above, below]
    return np.repeat(unit, TOGETHER)


def _halves(means: np.ndarray, leaf: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A leaf's `count` members that are lowest along its principal direction, and the others."""
    centred = means[leaf] - means[leaf].mean(0)
    # Nearly, by power iteration: a decomposition takes several times as long, for groups that are
    # tighter by a fifth of a percent (sum of squares, random keys).
    direction = centred[np.einsum("ij,ij->i", centred, centred).argmax()]
    for _ in range(_TURNS):
        direction = direction / max(np.abs(direction).max(), _TINY)
        direction = centred @ direction @ centred
    direction = direction / max(np.abs(direction).max(), _TINY)
    along = centred @ direction
    order = np.argsort(along, kind="stable")
    return np.sort(leaf[order[:count]]), np.sort(leaf[order[count:]])


def regroup(
    draft: Manifest,
    packs: ArrayWriter,
    assignment: ArrayWriter,
    step: Callable[[int, int], None],
) -> None:
    """Groups the tokens of every layer and KV head, and writes down which chunk each is in.

    A run of one head is in memory at a time. Its tokens keep their order within a chunk.

    `packs` has all packs, their tokens by position; `assignment` is filled. `step` is called for
    each run: how many are done and of how many, so that a long text is not taken for a disk that
    does nothing.
    """
    layout, size = draft.layout, draft.layout.chunk_tokens
    first, stop = steady(draft.first_chunk * size, len(draft.tokens), size)
    parts = list(runs(first, stop, size))
    ungrouped = by_position(len(draft.tokens), size)
    for group in range(layout.groups):
        chunk_of = ungrouped.copy()
        for number, (start, end) in enumerate(parts, 1):
            unit = _regroup_run(draft, packs, group, start, end)
            chunk_of[start * size : end * size] = chunk_of[start * size] + unit
            step(group * len(parts) + number, layout.groups * len(parts))
        draft.seal.seal("assignment", np.array([group]), np.zeros(1, int), chunk_of[None])
        assignment.put(group, chunk_of)


def _regroup_run(
    draft: Manifest, packs: ArrayWriter, group: int, start: int, end: int
) -> np.ndarray:
    """Groups the tokens of chunks [start, end) of one group; the unit int32 [n * C] of each."""
    layout, entry, count = draft.layout, group * draft.chunks + start, end - start
    memory = aligned(count * layout.pack_bytes).view(layout.disk_dtype)
    data = memory.reshape(count, *layout.pack_shape)  # [n, 1, 2, C, 1, D]
    read_written(draft, packs, entry, data)
    rows = data[:, 0, :, :, 0].swapaxes(0, 1)  # [2, n, C, D]
    kinds = rows.reshape(2, -1, layout.head_dim)
    unit = alike(as_float32(kinds[0], layout), layout.chunk_tokens)
    rows[...] = kinds[:, np.argsort(unit, kind="stable")].reshape(rows.shape)
    draft.seal.seal("packs", np.full(count, group), np.arange(start, end), data)
    packs.put(entry, data)
    return unit


def read_written(draft: Manifest, packs: ArrayWriter, entry: int, out: np.ndarray) -> None:
    """Read packs of a segment that is being written, from `entry` on, into `out` [n, *stored].

    Raises OSError where they are not as they were written.
    """
    group, first = divmod(entry, draft.chunks)
    part = on_disk(out, group, draft.layout)
    packs.get(entry, part)
    chunks = np.arange(first, first + len(out))
    if not draft.seal.open("packs", np.full(len(out), group), chunks, as_rows(part)).all():
        raise OSError(errno.EIO, "packs are not as they were written")
    if part is not out:
        held = part.shape[1]
        out[:, :held], out[:, held:] = part, 0
