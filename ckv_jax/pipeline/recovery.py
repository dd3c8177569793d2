"""Recovery: recomputes from the tokens the KV that the store could not deliver.

Every fault of the store ends here, never in a wrong answer.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Generator
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ckv_jax.pipeline.prefill import Prefill, Prefills
from ckv_jax.storage.errors import AssignmentDamaged, StoreUnavailable
from ckv_jax.storage.prefix import Prefix

Order = Callable[[np.ndarray | None], np.ndarray | None]
"""The order of a prefix, where it is needed; that of alike tokens is found again by all KV
[L, 2, T, K, D] of the prefix, where that is given. Raises a `StoreError` where it cannot be read,
`AssignmentDamaged` where that KV may tell it."""

_KEPT = 4  # prefixes whose recomputed KV stays without a request that holds it


class RecoveryNeeded(Exception):
    """A caller waits for KV that is still to be computed again; `recovered` can do so."""

    def __init__(self, recovered: Recovered, tokens: int) -> None:
        super().__init__(f"the first {tokens} tokens of prefix {recovered.prefix.id}")
        self.recovered = recovered
        self.tokens = tokens


def recover(needed: RecoveryNeeded) -> Generator[None, None, None]:
    """Computes a prefix again as far as it is needed, a block a step."""
    try:
        while needed.recovered.tokens < needed.tokens:
            needed.recovered.advance()
            yield
    finally:
        needed.recovered.pause()


class Recovered:
    """The dense KV of one prefix's first tokens, shared by all who wait for some of it.

    Engine thread only. Args:
        order: asked for where it is needed: int [L, T], the position of each token as stored, of a
            reordered prefix, [groups, T] of one of alike tokens; None: as they are.
        make_room: called where the folder for temporary files is full; whether it has freed some.
        in_memory: keep the KV in memory, not in a file without a name.
    """

    def __init__(
        self,
        prefix: Prefix,
        prefills: Prefills,
        order: Order,
        make_room: Callable[[], bool] = lambda: False,
        *,
        in_memory: bool = False,
    ) -> None:
        self.prefix = prefix
        self._prefills = prefills
        self._order_of = order
        self._make_room = make_room
        self._in_memory = in_memory
        self._kv: np.ndarray | None = None
        self._prefill: Prefill | None = None
        self.tokens = 0
        """Of the prefix, computed so far."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, 2, T, K, D] of all its KV."""
        layout = self.prefix.layout
        tokens = self.prefix.num_tokens
        return layout.num_layers, 2, tokens, layout.num_kv_heads, layout.head_dim

    @property
    def num_bytes(self) -> int:
        """Of all its KV."""
        return math.prod(self.shape) * self.prefix.layout.numpy_dtype.itemsize

    def _mapped(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Memory of a file without a name, for all its KV. Raises `StoreUnavailable` where the
        folder for temporary files has no room: a write past it would end the process."""
        try:
            with tempfile.TemporaryFile() as file:  # the mapping keeps it
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
                return np.memmap(file, dtype, "r+", shape=self.shape)
        except OSError as error:
            if self._make_room():
                return self._mapped(dtype)
            raise StoreUnavailable(
                f"cannot keep {self.num_bytes:,} bytes of recomputed KV in {tempfile.gettempdir()}:"
                f" {error.strerror}; free space there or set TMPDIR"
            ) from error

    def advance(self) -> None:
        """Computes one more block."""
        layout = self.prefix.layout
        if self._kv is None:
            if self._in_memory:
                bits = np.empty(self.shape, layout.disk_dtype)
            else:
                bits = self._mapped(layout.disk_dtype)
            self._kv = np.asarray(bits).view(layout.numpy_dtype)
        if self._prefill is None:
            rest = self.prefix.tokens[self.tokens :]
            self._prefill = self._prefills.begin(rest, start=self.tokens, earlier=self)
        block = self._prefill.advance()
        self.tokens = block.first + block.length
        self._kv[:, :, block.first : self.tokens] = block.tokens_kv(layout.numpy_dtype)

    def pause(self) -> None:
        """Gives device memory back until more is needed."""
        self._prefill = None

    def read(self, layers: range, first: int, stop: int) -> np.ndarray:
        """See `prefill.Earlier`."""
        assert self._kv is not None
        return np.ascontiguousarray(self._kv[layers.start : layers.stop, :, first:stop])

    def packs(self, group: int, chunks: np.ndarray) -> np.ndarray:
        """Packs [n, *pack_shape] of a layer group, zero past the prefix's last token.

        Raises `RecoveryNeeded` unless they have been computed.
        """
        layout = self.prefix.layout
        size, total = layout.chunk_tokens, self.prefix.num_tokens
        layers = layout.group_layers(group)
        stored = [np.arange(c * size, min((c + 1) * size, total)) for c in chunks.tolist()]
        rows = [group] * len(layers) if layout.alike else layers
        wanted = [[self._positions(row, at) for row in rows] for at in stored]
        self._require(max(int(tokens.max()) for row in wanted for tokens in row) + 1)
        assert self._kv is not None
        out = np.zeros((len(chunks), *layout.pack_shape), layout.numpy_dtype)
        kinds = slice(None) if layout.kv_together else slice(group % 2, group % 2 + 1)
        heads = layout.group_heads(group)
        for row, by_layer in enumerate(wanted):
            for place, (layer, tokens) in enumerate(zip(layers, by_layer, strict=True)):
                out[row, place, :, : len(tokens)] = self._kv[layer, kinds, :, heads][:, tokens]
        return out

    def keys(self, layer: int) -> np.ndarray:
        """Keys [T, K, D] of one layer, as stored. Raises `RecoveryNeeded` unless they have been
        computed."""
        self._require(self.prefix.num_tokens)
        assert self._kv is not None
        rows: np.ndarray = self._kv[layer, 0]
        layout = self.prefix.layout
        if self._order is None:
            return rows
        if not layout.alike:
            by_layer: np.ndarray = rows[self._order[layer]]
            return by_layer
        first = layer * layout.parts
        of_heads = self._order[first : first + layout.parts].T  # [T, K]
        stored: np.ndarray = np.take_along_axis(rows, of_heads[:, :, None], axis=0)
        return stored

    @cached_property
    def _order(self) -> np.ndarray | None:
        try:
            return self._order_of(None)
        except AssignmentDamaged:
            pass  # what is computed again tells; not so of a segment that is gone
        self._require(self.prefix.num_tokens)
        return self._order_of(self._kv)

    def _positions(self, row: int, stored: np.ndarray) -> np.ndarray:
        """The positions in the prefix of tokens as stored in a row of its order."""
        positions: np.ndarray = stored if self._order is None else self._order[row, stored]
        return positions

    def _require(self, tokens: int) -> None:
        if self.tokens < tokens:
            raise RecoveryNeeded(self, tokens)


class Recoveries:
    """The prefixes that KV was recomputed for of late. Engine thread only.

    Those that a request holds stay (`Sequence.recovered`): else one could take the place of
    another, over and over. Of others the latest ones stay.

    Args:
        memory_bytes: of an encrypted store, whose KV no disk gets in clear: the latest ones stay in
            so much memory, or in what one prefix takes. None: in files.
    """

    def __init__(self, prefills: Prefills, memory_bytes: int | None = None) -> None:
        self._prefills = prefills
        self._memory_bytes = memory_bytes
        self._known: OrderedDict[Prefix, Recovered] = OrderedDict()
        self._alive: WeakValueDictionary[Prefix, Recovered] = WeakValueDictionary()

    def of(self, prefix: Prefix, order: Order) -> Recovered:
        """Returns the recomputed KV of a prefix, perhaps none."""
        known = self._alive.get(prefix)
        if known is None:
            known = self._alive[prefix] = self.begin(prefix, order)
        self._known[prefix] = known
        self._known.move_to_end(prefix)
        while len(self._known) > (1 if self._full() else _KEPT):
            self._known.popitem(last=False)
        return known

    def begin(self, prefix: Prefix, order: Order) -> Recovered:
        """Nothing of a prefix yet; not kept here."""
        in_memory = self._memory_bytes is not None
        return Recovered(prefix, self._prefills, order, self._make_room, in_memory=in_memory)

    def _full(self) -> bool:
        held = sum(known.num_bytes for known in self._known.values())
        return self._memory_bytes is not None and held > self._memory_bytes

    def _make_room(self) -> bool:
        """Lets the oldest prefix go; whether there was one. It keeps its room if a request holds
        it."""
        for prefix in [prefix for prefix, known in self._known.items() if known.tokens]:
            del self._known[prefix]
            return True
        return False
