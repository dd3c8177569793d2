"""`Select`, the selection of chunks for a question or a generated token, and the chunks that are
always selected.

A trained model gives its first tokens a third of all attention whatever is asked (StreamingLLM's
sinks), and its latest ones much of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ckv_jax.buckets import chunk_bucket
from ckv_jax.errors import check_whole
from ckv_jax.storage.layout import Layout

if TYPE_CHECKING:  # load jax
    from jax import Array
    from jaxtyping import Bool, Float32

    from ckv_jax.kernels_pallas.score.probe import Probe
    from ckv_jax.selection.base import ChunkScore

MOST_QUERIES = 64
"""The scores of so many tokens are kept in host memory, for every generation and period."""

_MOST = 1024
_MOST_EVERY = 64


class Always(Protocol):
    """The interface of always-kept chunks. Hashable, because programs are compiled for it."""

    def most(self, layout: Layout, tokens: int) -> int:
        """Returns the most chunks that it adds to a selection, over a prefix of `tokens` tokens."""

    def chunks(
        self,
        scores: Float32[Array, "R M"],
        probes: Sequence[Probe],
        num_tokens: Array,
        num_chunks: Array,
        limits: Array,
        chunk_tokens: int,
    ) -> Bool[Array, "R M"] | None:
        """Returns a mask of the kept chunks of each row of `scores`, inside a jitted call; None: no
        chunk.

        `probes` has for each prefix the probe that its rows were scored by; each prefix has equally
        many rows, its heads one after the other. `num_tokens` and `num_chunks` are those of each
        row's prefix, int32 [R] or one number. `limits` has the chunks that each row selects, kept
        chunks included.
        """


@dataclass(frozen=True, slots=True)
class Nothing:
    """Keeps no chunk: every chunk is selected by its score."""

    def most(self, layout: Layout, tokens: int) -> int:
        return 0

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> None:  # fmt: skip
        return


@dataclass(frozen=True, slots=True)
class Ends:
    """Always-kept chunks: those with the first and the last tokens of a prefix."""

    first: int = 16
    """Number of first tokens, at least 1."""
    last: int = 64
    """Number of last tokens, at least 1."""

    def __post_init__(self) -> None:
        check_whole("first", self.first, least=1)
        check_whole("last", self.last, least=1)

    def most(self, layout: Layout, tokens: int) -> int:
        """Returns the most chunks at both ends of a prefix of `tokens` tokens."""
        size, chunks = layout.chunk_tokens, layout.num_chunks(tokens)
        tail = max(0, tokens - self.last) // size
        return min(chunks, -(-self.first // size) + chunks - tail)

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> Array:  # fmt: skip
        """Returns a mask, bool [B, M], of the chunks at both ends of each row's prefix."""
        import jax.numpy as jnp

        rows, chunks = scores.shape
        start = jnp.arange(chunks, dtype=jnp.int32)[None, :] * chunk_tokens
        end = jnp.broadcast_to(num_tokens, (rows,))[:, None]
        held: Array = (start < self.first) | (
            (start + chunk_tokens > end - self.last) & (start < end)
        )
        return held


NOTHING = Nothing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coarse:
    """Coarse pass of a two-stage selection, by the last query of the middle scoring layer.

    It scores all chunks and keeps `survivors` for each chunk that may be selected. The second
    stage, with all queries of all scoring layers, scores only those. The cost of the coarse pass
    grows with the prefix, that of the second stage with the budget. If more than a quarter of the
    chunks would be kept, all are scored in one stage.
    """

    survivors: int = 8
    """Chunks to keep for each chunk that may be selected."""
    least: int = 1
    """Minimum number of chunks to keep. Where few chunks may be selected, a small multiple of them
    is cheap to score but may miss the best ones."""

    def __post_init__(self) -> None:
        check_whole("survivors", self.survivors, least=1, most=_MOST)
        check_whole("least", self.least, least=1, most=_MOST)

    def left(self, limits: Any, chunks: Any) -> Any:
        """How many of `chunks` are left for rows that may select `limits` int32 [B], numpy's or a
        device's, of them; 0: all are scored."""
        wanted = (limits * self.survivors).clip(self.least)
        stands = (limits > 0) & (wanted <= chunks // 4)
        return wanted * stands.astype(limits.dtype)

    def stages(self, limits: np.ndarray, chunks: int) -> Stages | None:
        """Returns the static arguments for rows with `limits` int32 [B]; None: one stage."""
        left = self.left(limits, chunks)
        if not left.any():
            return None
        room = chunk_bucket(int(left.max()), chunks // 4)
        return Stages(self, room, bool((limits > left).any()))


class Stages(NamedTuple):
    """Static arguments of a selection in two stages."""

    coarse: Coarse
    room: int
    """Chunks that a row has left at most, and more."""
    some_whole: bool
    """Whether some rows have all of their chunks scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """How one selection is made: queries score the keys of every chunk, and the best are selected.

    A re-prefill selects once per period of layers (`SystemConfig.reprefill`), a generated token
    selects for itself (`SystemConfig.decode`). All heads of a layer select together. Raises
    `ValueError` for fields that are out of range or do not fit together.
    """

    score_layers: int = 1
    """Number of layers of a period that score, spread evenly over it; their scores are summed. 1 is
    the paper's method, the first layer. Each layer computes its queries from the hidden state that
    enters the period; more than 1 needs a digest of these layers."""
    queries: int | None = 1
    """Number of tokens whose scores are summed: of a question its last ones (None: all), of a
    generation those of its latest selections (1 to 64). With more of them, selections change less
    from token to token, and fewer packs are read."""
    peaks: bool = False
    """False: a chunk's score is the sum of its attention mass over queries and heads (Equation 1).
    True: the sum of squared masses, weighted by 1 / (1 + d) for the query d places before the last.
    A chunk with all the attention of one query and head then ranks before chunks with a little
    attention from every query."""
    score: ChunkScore | None = None
    """Your own score function, in place of these."""
    every: int = 1
    """Of a generation: the number of tokens (1 to 64) that attend to one selection, which the first
    of them makes. The others cost no scoring and no read."""
    coarse: Coarse | None = None
    """Coarse pass of a two-stage selection; None: one stage. Requests over several documents always
    use one stage."""

    def __post_init__(self) -> None:
        check_whole("score_layers", self.score_layers, least=1)
        if self.queries is not None:
            check_whole("queries", self.queries, least=1)
        check_whole("every", self.every, least=1, most=_MOST_EVERY)
        if self.score is not None and (self.coarse is not None or self.peaks):
            raise ValueError("got a score with coarse or peaks, expected only one of them")

    def check_text(self) -> None:
        """Checks that generated tokens can use this selection; else raises `ValueError`."""
        if self.queries is None:
            raise ValueError("got decode=Select(queries=None), expected a number of tokens")
        check_whole("queries", self.queries, least=1, most=MOST_QUERIES)


WHOLE_QUESTION = Select(queries=None)
"""The first layer of a period, by all tokens of the question (ContiguousKV §4.3)."""
