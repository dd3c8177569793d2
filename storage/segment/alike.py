"""Segments of clustered tokens: clustering at writing, and recovery of the assignment.

KVDrive (§4) and RetroInfer group alike tokens of a layer and KV head into clusters, a segment of
8,192 tokens at a time. Here a cluster is exactly one chunk: tokens that stand side by side in fours
are halved at the median along their principal direction until one chunk of them is left together.

The same keys give the same groups, and packs hold keys of their own: an assignment that is lost
follows from the keys of the segment's tokens, computed again. Its checksum says whether it is the
one that was written.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import numpy as np

from ckv_jax.storage.digest import as_float32
from ckv_jax.storage.errors import SegmentDamaged
from ckv_jax.storage.layout import TOGETHER, by_position, order_of, runs, steady
from ckv_jax.storage.segment.arrays import ArrayWriter, aligned, as_rows, on_disk
from ckv_jax.storage.segment.manifest import Manifest
from ckv_jax.storage.segment.segment import Segment

_log = logging.getLogger(__name__)
_LARGEST = np.float32(1e15)
_TINY = np.finfo(np.float32).tiny
_TURNS = 8  # of the power iteration

Keys = Callable[[int], np.ndarray]
"""The keys [n, D] of a group, bit patterns of the segment's first n tokens by position."""


def alike(keys: np.ndarray, unit_tokens: int) -> np.ndarray:
    """The unit int32 [T] of each token of `keys` [T, D]: of `unit_tokens` alike tokens each. T is a
    multiple of `unit_tokens`, and `unit_tokens` of `TOGETHER`."""
    size = unit_tokens // TOGETHER
    means = keys.reshape(-1, TOGETHER, keys.shape[-1]).mean(1, dtype=np.float32)
    means = bounded(means)
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


def bounded(keys: np.ndarray) -> np.ndarray:
    """Keys without what is so large that sums of squares would be infinite."""
    within: np.ndarray = np.clip(keys, -_LARGEST, _LARGEST)
    return within


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


def recover_assignment(segment: Segment, tokens: int, keys: Keys) -> tuple[np.ndarray, np.ndarray]:
    """What the assignment is, or must have been where it is proven bad.

    Args:
      tokens: n, of the segment's first ones: all, or so many that no run is cut (`Layout.cut`).
      keys: of a group, asked for where its row is bad.

    Returns:
      uint16 [groups, n]: the chunk of each token, counted in its run; and bool [groups]: whether
      that is certain, by the checksum of the whole row. Where it is not, it is what the good packs
      hold, and tokens of several chunks whose packs are bad as well are taken in their order:
      together those chunks hold exactly these.

    Raises:
      SegmentDamaged: what the packs hold is unknown.
      StoreUnavailable: something can neither be read nor proven bad.
    """
    groups = segment.manifest.layout.groups
    found, certain = np.empty((groups, tokens), "<u2"), np.ones(groups, bool)
    for group in range(groups):
        stored = segment.assignment_row(group)
        if stored is None:
            found[group], certain[group] = _row(segment, group, keys(group))
        else:
            found[group] = stored[:tokens]
    return found, certain


def recover_order(segment: Segment, tokens: int, keys: Keys) -> np.ndarray:
    """int32 [groups, n]: `recover_assignment` as the position of each token as stored."""
    found, certain = recover_assignment(segment, tokens, keys)
    if not certain.all():
        _log.warning(
            "segment %s: the assignment of tokens to packs is damaged for %d heads. Tokens are "
            "assigned to the packs with the nearest keys, the rest in order to the damaged packs; "
            "no checksum verifies this",
            segment.id, int((~certain).sum()),
        )  # fmt: skip
    return order_of(found, segment.manifest.layout.chunk_tokens)


def _row(segment: Segment, group: int, keys: np.ndarray) -> tuple[np.ndarray, bool]:
    """The assignment uint16 [n] of one group by its `keys` [n, D], and whether it is certain."""
    manifest, tokens = segment.manifest, len(keys)
    layout, size = manifest.layout, manifest.layout.chunk_tokens
    values = as_float32(keys, layout)
    first, stop = steady(manifest.first_chunk * size, len(manifest.tokens), size)
    spans = list(runs(first, min(stop, tokens // size), size))
    row = by_position(tokens, size)
    for start, end in spans:
        part = slice(start * size, end * size)
        row[part] = row[start * size] + alike(values[part], size)
    if not spans or _as_written(segment, group, row):
        return row, True
    # Keys that were computed again may differ in their last bits: which tokens do the packs hold?
    row = by_position(tokens, size)
    for start, end in spans:
        part = slice(start * size, end * size)
        row[part] = row[start * size] + _matched(segment, group, start, end, values[part])
    return row, _as_written(segment, group, row)


def _as_written(segment: Segment, group: int, row: np.ndarray) -> bool:
    """Whether a whole row of the assignment has the checksum of the one that was written."""
    if len(row) < len(segment.manifest.tokens):
        return False
    return segment.manifest.seal.is_of("assignment", group, 0, row.view(np.uint8))


def _matched(segment: Segment, group: int, start: int, end: int, keys: np.ndarray) -> np.ndarray:
    """The unit int64 [n] of each token of chunks [start, end) by what the packs hold.

    `keys` float32 [n, D], by position. Neighbours lie together in fours: a four of a pack has the
    keys that are nearest to it.
    """
    layout = segment.manifest.layout
    fours = layout.chunk_tokens // TOGETHER
    mine = bounded(keys).reshape(len(keys) // TOGETHER, -1)
    norms = np.einsum("ij,ij->i", mine, mine)
    stored, good, bad = [], [], []
    for chunk in range(start, end):
        data = segment.reread("packs", group, chunk)
        if data is None:
            bad.append(chunk - start)
            continue
        pack = data.view(layout.disk_dtype).reshape(layout.pack_shape)
        stored.append(bounded(as_float32(pack[0, 0, :, 0], layout)).reshape(fours, -1))
        good.append(chunk - start)
    unit = np.full(len(mine), -1)
    if good:
        nearest = (norms - 2 * (np.concatenate(stored) @ mine.T)).argmin(1)
        unit[nearest] = np.repeat(good, fours)
    left = np.flatnonzero(unit < 0)
    if len(left) != fours * len(bad):
        raise SegmentDamaged(f"segment {segment.id}: several packs hold the same keys")
    unit[left] = np.repeat(bad, fours)
    return np.repeat(unit, TOGETHER)
