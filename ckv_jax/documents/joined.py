"""Several stored documents in a row: which token is where, which chunks are attended to or computed
again, and how keys move along the positions.

R(p + offset) = R(offset) R(p), pair of dimensions by pair, where a pair turns by the same angle
with every token: plain RoPE, YaRN and Llama 3, which only change that angle. YaRN's factor on
cosines and sines is in the stored keys already and must not come in twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from ckv_jax.errors import UnsupportedModel
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.rope import Llama3Scaling, YarnScaling, inverse_frequencies
from ckv_jax.request import Recompute
from ckv_jax.storage.prefix import Prefix

_TURNING = (YarnScaling, Llama3Scaling)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedDocuments:
    """Chunks of all documents, numbered through in order: [M] of each kind."""

    documents: tuple[Prefix, ...]
    offsets: np.ndarray
    """int64 [n]: position of each document's first token."""
    document: np.ndarray
    """int64 [M]: the document of each chunk."""
    chunk: np.ndarray
    """int64 [M]: its number within the document."""
    first: np.ndarray
    """int64 [M]: position of its first token."""
    length: np.ndarray
    """int64 [M]: its tokens; fewer than a chunk has only where a document ends."""

    @classmethod
    def of(cls, documents: Sequence[Prefix]) -> JoinedDocuments:
        """Documents of at least one token each, of one layout, in this order."""
        size = documents[0].layout.chunk_tokens
        counts = [one.num_chunks for one in documents]
        offsets = np.cumsum([0] + [one.num_tokens for one in documents])
        document = np.repeat(np.arange(len(documents)), counts)
        chunk = np.concatenate([np.arange(count) for count in counts])
        first = offsets[document] + size * chunk
        return cls(
            documents=tuple(documents),
            offsets=offsets[:-1],
            document=document,
            chunk=chunk,
            first=first,
            length=np.minimum(size, offsets[document + 1] - first),
        )

    @property
    def num_tokens(self) -> int:
        """T, of all documents."""
        return int(self.first[-1] + self.length[-1])

    @property
    def num_chunks(self) -> int:
        """M."""
        return len(self.chunk)

    @property
    def ends(self) -> np.ndarray:
        """The chunks that hold fewer tokens than others: [m]."""
        return np.flatnonzero(self.length < self.documents[0].layout.chunk_tokens)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]."""
        return np.concatenate([one.tokens for one in self.documents])

    def positions(self, chunks: np.ndarray) -> np.ndarray:
        """Those of all tokens of some chunks, int64 [n], in the chunks' order."""
        return _runs(self.first[chunks], self.length[chunks])


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows:
    """A buffer whose rows are the tokens of some chunks, in order of position."""

    chunks: np.ndarray
    """int64 [m], ascending."""
    chunk: np.ndarray
    """int64 [R]: the chunk of each row."""
    within: np.ndarray
    """int64 [R]: the row's place within its chunk."""

    @classmethod
    def of(cls, joined: JoinedDocuments, chunks: np.ndarray) -> JoinedRows:
        """The rows of `chunks`, ascending."""
        lengths = joined.length[chunks]
        return cls(
            chunks=chunks,
            chunk=np.repeat(chunks, lengths),
            within=_runs(np.zeros(len(chunks), np.int64), lengths),
        )

    def __len__(self) -> int:
        return len(self.chunk)

    def of_chunks(self, chunks: np.ndarray) -> np.ndarray:
        """The rows int64 [n] of some of the chunks, ascending."""
        return np.flatnonzero(np.isin(self.chunk, chunks))


def _runs(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... length[0] of them, then those of the next."""
    before = np.cumsum(length) - length
    runs: np.ndarray = np.arange(int(length.sum())) + np.repeat(first - before, length)
    return runs


def best_chunks(scores: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    """The `count` best of the chunks `among` by `scores` [M], ascending; of equals the earlier."""
    order = np.argsort(-scores[among], kind="stable")
    return np.sort(among[order[:count]])


def attended_chunks(
    joined: JoinedDocuments, scores: np.ndarray, count: int, lost: np.ndarray
) -> np.ndarray:
    """About `count` chunks for one selection, ascending: the ends of the documents, which may be
    short, and the best others, as many in every period. None of `lost` is among them."""
    must = np.setdiff1d(joined.ends, lost)
    among = np.setdiff1d(np.arange(joined.num_chunks), np.concatenate([must, lost]))
    return np.union1d(must, best_chunks(scores, among, max(0, count - len(must))))


def recomputed_chunks(
    joined: JoinedDocuments, scores: np.ndarray, tokens: int, select: Recompute, lost: np.ndarray
) -> np.ndarray:
    """The chunks, ascending, to be computed again: `lost` ones, and others of the documents after
    the first as long as they hold no more than `tokens`, but one if that is not 0.

    "attended": in order of `scores` [M] (ProphetKV: the mean over all layers of the question's
    attention). "first": the first chunk of each document, then the second of each (EPIC). "both":
    as "attended", after the first chunk of each document.
    """
    later = np.setdiff1d(np.flatnonzero(joined.document > 0), lost)
    number, worth = joined.chunk[later], scores[later]
    keys = {
        "attended": (-worth,),
        "first": (number,),
        "both": (-worth, number > 0),  # the last key counts first
    }
    order = later[np.lexsort(keys[select])]
    fitting = np.cumsum(joined.length[order]) <= tokens
    return np.union1d(order[: max(int(fitting.sum()), min(1, tokens))], lost)


def stored_chunks(
    joined: JoinedDocuments, scores: np.ndarray, selected: Sequence[np.ndarray], new: np.ndarray
) -> list[np.ndarray]:
    """What is attended to as stored besides the chunks `new`, period by period, ascending.

    What each period selected, and the chunk before each of `new`, on which its first tokens
    lean. All periods get as many tokens, those that lack some their next best chunks by
    `scores` [periods, M].
    """
    before = np.setdiff1d(new[new > 0] - 1, new)
    kept = [np.union1d(np.setdiff1d(ids, new), before) for ids in selected]
    short = np.setdiff1d(joined.ends, new)
    kept = [np.union1d(ids, short) for ids in kept]
    most = max(map(len, kept))
    every = np.setdiff1d(np.arange(joined.num_chunks), new)
    return [
        np.union1d(ids, best_chunks(row, np.setdiff1d(every, ids), most - len(ids)))
        for ids, row in zip(kept, scores, strict=True)
    ]


def check_rotates(config: ModelConfig) -> None:
    """Raises `UnsupportedModel` for positions whose keys cannot be moved by a rotation."""
    scaling = config.rope_scaling
    if scaling is not None and not isinstance(scaling, _TURNING):
        raise UnsupportedModel(
            f"got rope scaling {type(scaling).__name__}, expected none, yarn or llama3: keys of "
            "other positions cannot be rotated to another place"
        )


def rotations(
    config: ModelConfig, offsets: Sequence[int]
) -> tuple[Float32[np.ndarray, "n D"], Float32[np.ndarray, "n D"]]:
    """Tables with which `model.rope.apply_rope` moves keys by `offsets` tokens, a row for each.

    In float64 from the model's own float32 frequencies: at tens of thousands of tokens a float32
    angle is off by a thousandth of a radian.
    """
    frequencies, _ = inverse_frequencies(config)
    angles = np.asarray(offsets, np.float64)[:, None] * frequencies.astype(np.float64)[None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    tables = np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
    return tables[0].astype(np.float32), tables[1].astype(np.float32)
