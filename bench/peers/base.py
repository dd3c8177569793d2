"""What a peer is asked, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A prefix and what is asked about it."""

    tokens: np.ndarray
    """int32 [T]."""
    suffixes: tuple[np.ndarray, ...]
    """int32 [S] each."""
    answers: np.ndarray | None = None
    """int32 [Q]: the token that is right after each; None for a model that knows nothing."""
    text: np.ndarray | None = None
    """int32 [N], N >= 2: what every answer goes on with, whatever the model makes of it; None:
    first tokens alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint, and the pages that every peer is asked about."""

    name: str
    folder: Path
    """The checkpoint, in HF format."""
    pages: tuple[Page, ...]
    recomputes: int
    """Questions of a page that are also asked where everything is computed for each."""

    @property
    def longest(self) -> int:
        """Tokens of the longest suffix."""
        return max(len(suffix) for page in self.pages for suffix in page.suffixes)

    @property
    def text(self) -> int:
        """Tokens of the longest text that answers go on with."""
        return max(len(page.text) if page.text is not None else 0 for page in self.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One first token."""

    token: int
    ms: float
    """Wall clock, from the question to the token."""
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    """What of it went where, if the peer can tell."""
    token_ms: float | None = None
    """Wall clock of each of the N - 1 tokens after the first of a page's `text`, mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of answering over a prefix that is held."""

    ask: Callable[[np.ndarray], Answer]
    kept: float = 1.0
    """Share of the prefix's keys and values that may take part."""
    most: int | None = None
    """Questions of a page that it is asked; None: all."""


Held = Mapping[str, Way | str]
"""Ways by what they do; in place of one that does not work, why."""
Holder = Callable[[Page], Held]
"""Takes a page's prefix and lets go of the one before."""


class Peer(Protocol):
    """A program that answers questions over long prefixes."""

    packages: tuple[str, ...]
    """What has to be importable."""
    install: str
    """The command that makes it so."""

    def open(self, case: Case, work: Path) -> AbstractContextManager[Holder]:
        """Loads the checkpoint; files go to `work`. Raises `NotForThis` where it has no part."""
        ...


class NotForThis(Exception):
    """Why a peer takes no part in a case."""
