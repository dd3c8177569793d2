"""The first keys and values of a long text, which stay on the device while others come and go."""

from __future__ import annotations

from collections.abc import Iterator

from jax import Array

from ckv_jax.pipeline.pieces import Pieces

PIECE_BLOCKS = 4  # blocks of earlier tokens that are attended to at a time


def spans(first: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Positions [first, stop) in pieces of `PIECE_BLOCKS` blocks, then of one: two lengths, each of
    which is a program. The last is shorter where `stop` is within a block."""
    size = PIECE_BLOCKS * block
    while first < stop:
        end = min(stop, first + (size if first + size <= stop else block))
        yield first, end
        first = end


class KeptWindow:
    """Each layer's (K, V) [1, R, K*D] of some tokens, in pieces as long as those of `spans`.

    Which piece has which tokens does not matter: later tokens see all of them.
    """

    def __init__(self, pieces: Pieces, num_layers: int, block: int) -> None:
        self._pieces = pieces
        self._block = block
        self._kept: list[list[tuple[Array, Array]]] = [[] for _ in range(num_layers)]

    def rows(self, layer: int) -> list[tuple[Array, Array]]:
        """What is kept of one layer."""
        return self._kept[layer]

    def keep(self, layer: int, keys: Array, values: Array) -> None:
        """Takes a piece as it is."""
        self._kept[layer].append((keys, values))

    def add(self, layer: int, keys: Array, values: Array) -> None:
        """Takes the next block [1, block, K*D]; only its first rows where it goes on with a block
        of which some are kept already."""
        kept = self._kept[layer]
        kept.append((keys, values))
        if len(kept) > 1 and kept[-2][0].shape[1] < self._block:
            self._join(kept, 2, self._block)
        single = [keys.shape[1] == self._block for keys, _ in kept[-PIECE_BLOCKS:]]
        if len(single) == PIECE_BLOCKS and all(single):
            self._join(kept, PIECE_BLOCKS, PIECE_BLOCKS * self._block)

    def _join(self, kept: list[tuple[Array, Array]], count: int, rows: int) -> None:
        """The last `count` pieces become one of so many rows."""
        keys, values = zip(*kept[-count:], strict=True)
        kept[-count:] = [(self._pieces.join(keys, rows), self._pieces.join(values, rows))]
