"""`Select`: what is chosen while text is generated, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from ckv_jax.validate import check_whole

MOST_QUERIES = 64
"""The scores of so many tokens are kept in host memory, for every sequence and period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """A choice of decode: score what is known of every chunk, take the best.

    The newest tokens' own queries score the resident digest; all heads choose together.
    """

    score_layers: int = 1
    """Layers of a period whose scores are summed, see `SystemConfig.score_layers`."""
    every: int = 1
    """Tokens between two choices."""
    queries: int = 1
    """Tokens whose scores are summed for one choice: the newest, and the last ones before it that
    chose. With more of them, choices change less from token to token, and less is fetched."""
    guessed: bool = False
    """What enters a period chooses for the next one, which attends to that and nothing else
    (InfiniGen): reads have a period's time, and the choice is not the layers' own. What earlier
    `queries` count with are then their guesses."""

    def __post_init__(self) -> None:
        check_whole("score_layers", self.score_layers, least=1)
        check_whole("every", self.every, least=1)
        check_whole("queries", self.queries, least=1, most=MOST_QUERIES)
