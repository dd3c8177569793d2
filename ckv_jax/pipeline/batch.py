"""The suffixes of one re-prefill, padded to buckets, and the prefixes they ask about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ckv_jax.buckets import batch_bucket, chunk_bucket, suffix_bucket
from ckv_jax.prefix.digest import Digest
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.selection.base import Selection, Share


@dataclass(slots=True, kw_only=True)
class Member:
    """One prefix of a batch, and the batch rows that ask about it."""

    opened: OpenPrefix
    probes: Digest
    rows: np.ndarray
    """int32 [b], padded to a bucket; where a row comes twice, the later one is padding."""
    lengths: np.ndarray
    """int32 [b]: suffix tokens of each; 0 for padding."""
    limits: np.ndarray
    """int32 [b]: chunks (or tokens) that each may select; 0 for padding."""
    share: Share
    """Of each: how much attention is enough, see `Budget`."""

    real: np.ndarray = field(init=False)
    """The batch rows of `rows` that are no padding."""
    columns: int | None = field(init=False)
    """Of selected ids, as many as some row may have; None: attention decides."""

    def __post_init__(self) -> None:
        self.real = self.rows[self.lengths > 0]
        by_mass = (self.share.mass < 1).any()
        self.columns = (
            None if by_mass else chunk_bucket(int(self.limits.max()), self.opened.num_chunks)
        )

    def trimmed(self, ids: np.ndarray) -> np.ndarray:
        """Selected ids int32 [b, n], as many columns as some row may have, or has where attention
        decides."""
        columns = self.columns
        if columns is None:
            columns = chunk_bucket(int((ids >= 0).sum(axis=1).max()), self.opened.num_chunks)
        return ids[:, :columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Suffixes, padded to buckets, over the prefixes of `members`."""

    tokens: np.ndarray
    """int32 [B, S]."""
    lengths: np.ndarray
    """int32 [B]: tokens of each suffix; 0 for rows that are padding."""
    limits: np.ndarray
    """int32 [B]: chunks (or tokens) each row may select."""
    start: np.ndarray
    """int32 [B]: position of each row's first suffix token."""
    members: tuple[Member, ...]

    @classmethod
    def of(
        cls,
        suffixes: Sequence[np.ndarray],
        limits: Sequence[int],
        prefixes: Sequence[tuple[OpenPrefix, Digest]],
        which: Sequence[int],
        share: Share | None = None,
    ) -> Batch:
        """Pads `suffixes` (int32 [s] each, s >= 1) to a batch and length bucket.

        Row i asks about `prefixes[which[i]]`. `share`: of each suffix, default: its limit counts.
        """
        count = len(suffixes)
        rows = batch_bucket(count)
        tokens = np.zeros((rows, suffix_bucket(max(map(len, suffixes)))), np.int32)
        lengths, most, start = (np.zeros(rows, np.int32) for _ in range(3))
        for row, suffix in enumerate(suffixes):
            tokens[row, : len(suffix)] = suffix
        lengths[:count] = [len(suffix) for suffix in suffixes]
        most[:count] = limits
        start[:count] = [prefixes[i][0].prefix.num_tokens for i in which]
        mass, least = np.ones(rows, np.float32), np.ones(rows, np.int32)
        if share is not None:
            mass[:count], least[:count] = share
        members = []
        for index, (opened, probes) in enumerate(prefixes):
            mine = np.array([row for row in range(count) if which[row] == index], np.int32)
            if len(prefixes) == 1:
                padded, real = np.arange(rows, dtype=np.int32), lengths > 0
            else:
                padded = np.full(batch_bucket(len(mine)), mine[0], np.int32)
                padded[: len(mine)] = mine
                real = np.arange(len(padded)) < len(mine)
            members.append(
                Member(
                    opened=opened,
                    probes=probes,
                    rows=padded,
                    lengths=np.where(real, lengths[padded], 0).astype(np.int32),
                    limits=np.where(real, most[padded], 0).astype(np.int32),
                    share=Share(mass[padded], least[padded]),
                )
            )
        return cls(tokens=tokens, lengths=lengths, limits=most, start=start, members=tuple(members))

    def by_row(self, found: Sequence[np.ndarray]) -> np.ndarray:
        """Selected ids int32 [J, B, N] of all rows, J selections each, from those of each member's
        rows, [b, J, n]."""
        count, most = found[0].shape[1], max([ids.shape[2] for ids in found])
        selected = np.full((count, len(self.lengths), most), -1, np.int32)
        for member, ids in zip(self.members, found, strict=True):
            selected[:, member.real, : ids.shape[2]] = ids[member.lengths > 0].swapaxes(0, 1)
        return selected

    def valid(self, selected: np.ndarray) -> np.ndarray:
        """Valid tokens int32 [J, B, N] of each selected chunk, 0 where there is none."""
        lengths = np.zeros(selected.shape, np.int32)
        for member in self.members:
            ids = selected[:, member.real]
            lengths[:, member.real] = np.where(ids >= 0, member.opened.chunk_lengths[ids], 0)
        return lengths

    def masses(self, found: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """Share of attention float32 [P, B] that each row's selection of P periods covers, given
        each member's [b * J]; the mean of its selections."""
        mass = np.zeros((len(found), len(self.lengths)), np.float32)
        for member, mine in zip(self.members, zip(*found, strict=True), strict=True):
            by_row = np.stack(mine).reshape(len(found), len(member.rows), -1).mean(axis=2)
            mass[:, member.real] = by_row[:, member.lengths > 0]
        return mass

    def attention(self, made: Sequence[Sequence[Selection]], row: int) -> np.ndarray:
        """The share of its attention that a row gives each chunk, float32 [M], the mean over
        `made`, each period's selections of each member."""
        which = int(self.owners()[row])
        member = self.members[which]
        at = int(np.flatnonzero((member.rows == row) & (member.lengths > 0))[0])
        scores = np.stack([np.asarray(mine[which].scores) for mine in made])  # [P, b * J, M]
        mine = scores.reshape(len(made), len(member.rows), -1, scores.shape[2])[:, at]
        mine = np.where(np.isfinite(mine), mine, 0.0)[:, :, : member.opened.num_chunks]
        shares = mine / np.maximum(mine.sum(axis=2, keepdims=True), np.finfo(np.float32).tiny)
        mean: np.ndarray = shares.mean(axis=(0, 1)).astype(np.float32)
        return mean

    def owners(self) -> np.ndarray:
        """Member of each row, int32 [B]; -1 for padding."""
        owners = np.full(len(self.lengths), -1, np.int32)
        for which, member in enumerate(self.members):
            owners[member.real] = which
        return owners
