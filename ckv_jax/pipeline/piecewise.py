"""A step whose packs do not fit the pool at once: layer by layer, the packs go through in parts."""

from __future__ import annotations

import numpy as np
from jax import Array

from ckv_jax.buckets import chunk_bucket
from ckv_jax.pipeline.layers import LayerKv, Layers
from ckv_jax.pipeline.pieces import Part, Pieces
from ckv_jax.pipeline.plan import Step
from ckv_jax.prefix.memory import Memory
from ckv_jax.prefix.packs import Packs


class Piecewise:
    """Runs steps over more packs than the pool has room for. Engine thread only.

    A pack holds several layers, and each needs it at a time of its own: it is read once for each,
    unless the host pool keeps it. Slower than a step that fits, and the same answer to rounding.
    """

    def __init__(self, layers: Layers, memory: Memory) -> None:
        self._pieces = Pieces(layers)
        self._memory = memory

    def run(
        self,
        start: np.ndarray,
        packs: Packs,
        step: Step,
        chosen: np.ndarray,
        lengths: np.ndarray,
        owners: np.ndarray,
        hidden: Array,
        *,
        buffers: LayerKv | None = None,
        at: np.ndarray | None = None,
    ) -> tuple[Array, LayerKv]:
        """`Layers.run`, or with decode `buffers` `Layers.extend`, in parts.

        Args:
            chosen, lengths: int32 [J, B, N], chunk ids (-1: none) and their valid tokens, of each
                of a period's J choices.
            owners: int32 [B], the prefix of each row within `packs`, -1 for padding.
        """
        kv: list[tuple[Array, Array]] = []
        pack, parts = self._memory.pool.pages.shape[1], len(chosen)
        for layer in step.layers:
            groups = range(layer // pack * parts, (layer // pack + 1) * parts)
            if layer % pack == 0:  # so is a step's first: packs do not straddle steps
                for group in groups:
                    for which in np.unique(owners[owners >= 0]).tolist():
                        packs.start_over(which, group)
            part = self._pieces.open(layer, hidden, start)
            for head, group in enumerate(groups):
                part = self._over_packs(
                    part, layer % pack, head, packs, group, chosen[head], lengths[head], owners
                )
            if buffers is None:
                kv.append((part.k, part.v))
                hidden = self._pieces.close(layer, hidden, part)
                continue
            assert at is not None
            own = self._pieces.insert(buffers[len(kv)], part, at)
            kv.append(own)
            hidden = self._pieces.close(layer, hidden, part, own, at)
        return hidden, tuple(kv)

    def _over_packs(
        self, part: Part, index: int, head: int, packs: Packs, group: int, chosen: np.ndarray,
        lengths: np.ndarray, owners: np.ndarray,
    ) -> Part:  # fmt: skip
        """Attention to all chosen packs of one layer, or of one KV head of it where these are
        apart, as many at a time as there are slots."""
        wanted = sorted(
            {
                (int(owners[row]), int(chunk))
                for row in np.flatnonzero(owners >= 0).tolist()
                for chunk in chosen[row]
                if chunk >= 0
            }
        )
        done = 0
        while done < len(wanted):
            room = max(1, self._memory.step_slots)
            now = wanted[done : done + room]
            done += len(now)
            slot_of = self._collect(packs, group, now)
            rows = [
                [
                    (slot_of[owner, chunk], length)
                    for chunk, length in zip(ids, valid, strict=True)
                    if (owner, chunk) in slot_of
                ]
                for owner, ids, valid in zip(
                    owners.tolist(), chosen.tolist(), lengths.tolist(), strict=True
                )
            ]
            size = chunk_bucket(max(map(len, rows)))
            slots, valid = (
                np.full((len(rows), size), -1, np.int32),
                np.zeros((len(rows), size), np.int32),
            )
            for row, entries in enumerate(rows):
                if entries:
                    slots[row, : len(entries)], valid[row, : len(entries)] = np.transpose(entries)
            part = self._pieces.over_pages(part, index, self._memory.pool.pages, slots, valid, head)
            for which in {which for which, _ in now}:
                packs.give_up(which, group, part.lse)
        return part

    def _collect(
        self, packs: Packs, group: int, wanted: list[tuple[int, int]]
    ) -> dict[tuple[int, int], int]:
        """Device slot of every (prefix, chunk)."""
        found: dict[tuple[int, int], int] = {}
        by_prefix: dict[int, list[int]] = {}
        for which, chunk in wanted:
            by_prefix.setdefault(which, []).append(chunk)
        for which, chunks in by_prefix.items():
            packs.demand(which, group, np.array(chunks, np.int64))
        for which, chunks in by_prefix.items():
            slots = packs.collect(which, group, np.array(chunks, np.int64))
            found |= {(which, c): int(s) for c, s in zip(chunks, slots.tolist(), strict=True)}
        return found
