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
from ckv_jax.storage.layout import FIRST, LAST, Layout

if TYPE_CHECKING:  # load jax
    from jax import Array
    from jaxtyping import Bool, Float32

    from ckv_jax.kernels_pallas.score.probe import Probe
    from ckv_jax.selection.base import ChunkScore

MOST_QUERIES = 64
"""The scores of so many tokens are kept in host memory, for every generation and period."""

_MOST = 1024


class Always(Protocol):
    """Chunks that are always selected; hashable, as programs are compiled for it."""

    def most(self, layout: Layout, tokens: int) -> int:
        """The most chunks of a prefix of so many tokens that it adds to a selection."""
        ...

    def chunks(
        self,
        scores: Float32[Array, "R M"],
        probes: Sequence[Probe],
        num_tokens: Array,
        num_chunks: Array,
        limits: Array,
        chunk_tokens: int,
    ) -> Bool[Array, "R M"] | None:
        """Those of each row of `scores`, inside a jitted call; None: none.

        `probes`: of each prefix the one that its rows were scored by, as many rows of each, with
        its heads one after the other; `num_tokens`, `num_chunks`: of each row's prefix, int32 [R]
        or one number; `limits`: chunks that each row selects, what is always selected among them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Nothing:
    """No chunk is selected but for its score."""

    def most(self, layout: Layout, tokens: int) -> int:
        """None."""
        return 0

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> None:  # fmt: skip
        """None."""
        return


@dataclass(frozen=True, slots=True)
class Ends:
    """The chunks that hold some of a prefix's first and last tokens."""

    first: int = FIRST
    """Tokens of the prefix's beginning."""
    last: int = LAST
    """Tokens of its end."""

    def __post_init__(self) -> None:
        check_whole("first", self.first, least=1)
        check_whole("last", self.last, least=1)

    def most(self, layout: Layout, tokens: int) -> int:
        """Both ends."""
        size, chunks = layout.chunk_tokens, layout.num_chunks(tokens)
        tail = max(0, tokens - self.last) // size
        return min(chunks, -(-self.first // size) + chunks - tail)

    def chunks(
        self, scores: Array, probes: Sequence[Probe], num_tokens: Array, num_chunks: Array,
        limits: Array, chunk_tokens: int,
    ) -> Array:  # fmt: skip
        """Both ends of each row's prefix."""
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
    """A coarse pass over all chunks: the last query of the middle one of the layers that score.

    It leaves `survivors` chunks for each that may be selected. All queries of all scoring layers
    then decide among those alone. Its cost grows with the prefix, that of the rest with the budget.
    Where more than a quarter would be left, all are scored as without it.
    """

    survivors: int = 8
    """Chunks that are left for each that may be selected."""
    least: int = 1
    """Chunks that are left in any case: where few may be selected, a few times as many cost little
    to score and are less certain to hold them."""

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
        """What a call for rows with `limits` int32 [B] is compiled for; None: one stage for all."""
        left = self.left(limits, chunks)
        if not left.any():
            return None
        room = chunk_bucket(int(left.max()), chunks // 4)
        return Stages(self, room, bool((limits > left).any()))


class Stages(NamedTuple):
    """What is static of a selection in two stages."""

    coarse: Coarse
    room: int
    """Chunks that a row has left at most, and more."""
    some_whole: bool
    """Whether some rows have all of their chunks scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """One selection: score what is known of every chunk by some queries, take the best.

    A re-prefill makes one for each period of layers (`SystemConfig.reprefill`), every generated
    token makes its own (`SystemConfig.decode`). All heads of a layer select together.
    """

    score_layers: int = 1
    """How many layers of a period score for it, spread over it as evenly as whole numbers go,
    their scores summed: 1 is the paper's way, the first layer. Each makes its own queries of the
    hidden state that enters the period; more than 1 needs a digest, of these layers."""
    queries: int | None = 1
    """Tokens whose scores are summed for one selection. Of a question its last ones, None: all. Of
    a text, 1 to 64: the newest ones. With more of them selections change less from token to token,
    and less is fetched."""
    peaks: bool = False
    """The score of a chunk is the sum over queries and heads of the attention mass that it gets
    (Equation 1). True: of the squares of these masses, each weighed by 1 / (1 + d) for the query d
    places before the last. A chunk that one query of one head looks up then comes before chunks
    that get a little of every query's attention."""
    score: ChunkScore | None = None
    """A score of one's own in place of that."""
    coarse: Coarse | None = None
    """Scores in two stages; None: all chunks with all of that. Several documents have one stage."""

    def __post_init__(self) -> None:
        check_whole("score_layers", self.score_layers, least=1)
        if self.queries is not None:
            check_whole("queries", self.queries, least=1)
        if self.score is not None and (self.coarse is not None or self.peaks):
            raise ValueError("got a score with coarse or peaks, expected one of them")

    def check_text(self) -> None:
        """Raises `ValueError` for what the tokens of a text cannot do."""
        if self.queries is None:
            raise ValueError("got decode=Select(queries=None), expected a number of tokens")
        check_whole("queries", self.queries, least=1, most=MOST_QUERIES)


WHOLE_QUESTION = Select(queries=None)
"""The first layer of a period, by all tokens of the question (ContiguousKV §4.3)."""
