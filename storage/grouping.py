"""Tokens with alike keys, put together: which chunk of a stored segment each token is in.

KVDrive (§4) and RetroInfer group alike tokens of a layer and KV head into clusters, a segment of
8,192 tokens at a time. Here a cluster is exactly one chunk: tokens that stand side by side in fours
are halved at the median along their principal direction until one chunk of them is left together.
The same keys give the same groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

TOGETHER = 4
"""Tokens side by side that stay together."""
RUN = 8192
"""Tokens that are grouped with each other."""
_LARGEST = np.float32(1e15)
_TINY = np.finfo(np.float32).tiny
_TURNS = 8  # of the power iteration
FIRST, LAST = 16, 64
"""Tokens at a text's beginning and end that stay where they are, and are always attended to."""


def alike(keys: np.ndarray, unit_tokens: int) -> np.ndarray:
    """The unit int32 [T] of each token of `keys` [T, D]: of `unit_tokens` alike tokens each.

    Raises ValueError unless T is a multiple of that, and that a multiple of four.
    """
    if unit_tokens % TOGETHER or len(keys) % unit_tokens:
        raise ValueError(
            f"got {len(keys)} tokens in units of {unit_tokens}, expected multiples of "
            f"{unit_tokens} and of {TOGETHER}"
        )
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


def steady(first_token: int, tokens: int, chunk_tokens: int) -> tuple[int, int]:
    """[first, stop): the chunks of a segment whose tokens are grouped; the others stay as they are.

    `first_token`: the segment's first one, counted in its prefix; `tokens`: of the segment.
    """
    first = -(-max(0, FIRST - first_token) // chunk_tokens)
    return first, max(first, (tokens - LAST) // chunk_tokens)


def runs(first: int, stop: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """The chunks [first, stop) in runs of `RUN` tokens, which end where multiples of it do."""
    size = run_chunks(chunk_tokens)
    while first < stop:
        end = min(stop, (first // size + 1) * size)
        yield first, end
        first = end


def run_chunks(chunk_tokens: int) -> int:
    """The chunks of a run."""
    return max(1, RUN // chunk_tokens)


def by_position(tokens: int, chunk_tokens: int) -> np.ndarray:
    """uint16 [T]: the chunk of each token, counted in its run, where none is grouped."""
    chunk_of: np.ndarray = np.arange(tokens) // chunk_tokens % run_chunks(chunk_tokens)
    return chunk_of.astype("<u2")


def order_of(assignment: np.ndarray, chunk_tokens: int) -> np.ndarray:
    """int32 [R, T]: the position of each token as stored, of what each token is assigned to.

    `assignment` uint16 [R, T]: the chunk of each token, counted in its run.
    """
    tokens = assignment.shape[1]
    size = run_chunks(chunk_tokens) * chunk_tokens
    order = np.empty(assignment.shape, np.int32)
    for start in range(0, tokens, size):
        part = assignment[:, start : start + size]
        order[:, start : start + size] = start + np.argsort(part, axis=1, kind="stable")
    return order
