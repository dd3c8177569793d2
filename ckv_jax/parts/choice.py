"""Which chunks a layer attends to, and which are computed again: by scores, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckv_jax.parts.joined import Joined
from ckv_jax.request import Again


def best(scores: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """The `count` best of the chunks `among` by `scores` [M], ascending; of equals the earlier."""
    order = np.argsort(-scores[among], kind="stable")
    return np.sort(among[order[:count]])


def attended(joined: Joined, scores: np.ndarray, count: int, lost: np.ndarray) -> np.ndarray:
    """About `count` chunks for one choice, ascending: the ends of the parts, which may be short,
    and the best others, as many in every period. None of `lost` is among them."""
    must = np.setdiff1d(joined.ends, lost)
    among = np.setdiff1d(np.arange(joined.num_chunks), np.concatenate([must, lost]))
    return np.union1d(must, best(scores, among, max(0, count - len(must))))


def again(
    joined: Joined, scores: np.ndarray, tokens: int, choice: Again, lost: np.ndarray
) -> np.ndarray:
    """The chunks, ascending, to be computed again: `lost` ones, and others of the parts after the
    first as long as they hold no more than `tokens`, but one if that is not 0.

    "attended": in order of `scores` [M] (ProphetKV: the mean over all layers of the question's
    attention). "first": the first chunk of each part, then the second of each (EPIC). "both": as
    "attended", after the first chunk of each part.
    """
    later = np.setdiff1d(np.flatnonzero(joined.part > 0), lost)
    number, worth = joined.chunk[later], scores[later]
    keys = {
        "attended": (-worth,),
        "first": (number,),
        "both": (-worth, number > 0),  # the last key counts first
    }
    order = later[np.lexsort(keys[choice])]
    fitting = np.cumsum(joined.length[order]) <= tokens
    return np.union1d(order[: max(int(fitting.sum()), min(1, tokens))], lost)


def around(
    joined: Joined, scores: np.ndarray, chosen: Sequence[np.ndarray], new: np.ndarray
) -> list[np.ndarray]:
    """What is attended to as stored beside the chunks `new`, period by period, ascending.

    That which each period chose, and the chunk before each of `new`, on which its first tokens
    lean. All periods get as many tokens, those that lack some their next best chunks by
    `scores` [periods, M].
    """
    before = np.setdiff1d(new[new > 0] - 1, new)
    kept = [np.union1d(np.setdiff1d(ids, new), before) for ids in chosen]
    short = np.setdiff1d(joined.ends, new)
    kept = [np.union1d(ids, short) for ids in kept]
    most = max(map(len, kept))
    every = np.setdiff1d(np.arange(joined.num_chunks), new)
    return [
        np.union1d(ids, best(row, np.setdiff1d(every, ids), most - len(ids)))
        for ids, row in zip(kept, scores, strict=True)
    ]
