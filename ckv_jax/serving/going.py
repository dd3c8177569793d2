"""One running sequence, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ckv_jax.decode.decoder import Decoder, Row
from ckv_jax.decode.selection import RowSelector
from ckv_jax.decode.window import Window
from ckv_jax.prefix.open_prefix import OpenPrefix
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.prefix import Prefix
from ckv_jax.storage.segment.reader import PrefixReader

Written = tuple[Prefix, PrefixReader]
"""What has been stored, and what keeps others from removing it meanwhile."""


@dataclass(slots=True, kw_only=True)
class Tail:
    """What a text puts behind it: stored segments of what it generated, for itself alone."""

    prefix: Prefix
    """What it stands on: the prefix that it was asked over, and the segments so far."""
    provenance: str
    """Of the segments; no other text has it."""
    at: int
    """Tokens in its buffers with which the next segment is written, or moved onto, if it is."""
    exact: bool
    """Whether it attends to everything."""
    limit: int
    """Chunks of a choice, as of its first one."""
    room: int
    """Chunks that it may stand on in the end, so that one program serves all its choices."""
    end: Callable[[Tail], None]
    """Removes its segments."""
    writing: tuple[int, Future[Written]] | None = None
    """Tokens of the segment that is being written, and what the text stands on with it."""
    segments: list[Prefix] = field(default_factory=list)
    kv: list[np.ndarray] = field(default_factory=list)
    """Of the segments, [L, 2, n, K, D] each, where somebody asked for it."""
    ended: bool = False


@dataclass(slots=True, kw_only=True)
class Going:
    """One running sequence, and what it holds."""

    sequence: Sequence
    row: Row
    opened: OpenPrefix | None = None
    """What it stands on; None: nothing stored."""
    window: Window | None = None
    selector: RowSelector | None = None
    """None: what it attends to stays."""
    tail: Tail | None = None
    """None: what it generates stays in its buffers."""

    @property
    def streams(self) -> bool:
        """Whether its packs come through the pool anew for every token."""
        return self.window is not None and not self.window.held

    def kv(self, decoder: Decoder, place: int) -> np.ndarray:
        """Keys and values [L, 2, n, K, D] of all after the prefix that it was asked over."""
        first = max(self.sequence.prefix.num_tokens, self.row.start)
        parts = self.tail.kv if self.tail is not None else []
        return np.concatenate([*parts, decoder.kv(place, first)], axis=2)

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        if self.window is not None:
            self.window.close()
        if self.opened is not None:
            self.opened.close()
            self.opened = None
        if self.tail is not None:
            self.tail.end(self.tail)
