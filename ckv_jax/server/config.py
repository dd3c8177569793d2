"""Settings of a server: its model's name, defaults and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckv_jax.config import check_budget
from ckv_jax.errors import check_number, check_whole
from ckv_jax.fidelity import fidelity_of

SPARSE = ":sparse"
"""Suffix of the model's name in the alias that answers at `ServerConfig.sparse_budget`."""
MOST_GENERATIONS = 16
"""What one request may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Names, defaults and limits of one server."""

    model: str
    """The model's name for clients."""
    budget: float | str = 1.0
    """Budget of a request that gives none (see `Engine.ask`); 1: answers are exact."""
    sparse_budget: float | str = 0.25
    """The same for the model's sparse alias."""
    max_tokens: int = 1024
    """New tokens of a chat's answer where a request gives no number and the context has room."""
    max_requests: int = 64
    """Generations computed or waiting at once; further requests are refused (429)."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template where a request gives none, such as `enable_thinking`."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages that browsers may let read answers; "*": all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which requests without keys may come, beside addresses and the machine's own;
    ".name": all below it, too."""
    warm_tokens: int = 0
    """Length of the prompts whose programs are compiled before the server is ready; 0: programs are
    compiled when they are first needed."""
    store_tokens: int = 1024
    """The shortest prompts that are stored with their answers."""
    turn_tokens: int = 64
    """The fewest new tokens, prompt and answer, that are worth a write."""
    guard_disk: bool = True
    """Skip turns while writing them takes longer than computing them."""
    write_behind_bytes: int = 2**30
    """Host memory that turns may hold while they wait to be written."""
    prune_s: float = 60.0
    """Seconds between removals of expired prefixes."""
    max_body_bytes: int = 16 * 2**20
    """The largest body of a request; a larger one is refused (413)."""
    body_s: float = 30.0
    """Seconds in which a request's body has to arrive."""
    request_s: float = 600.0
    """Seconds after which a generation ends with the tokens it has."""
    send_s: float = 60.0
    """Seconds that a client may leave a piece of its answer unread."""
    drain_s: float = 60.0
    """Seconds that a shutdown may take, running answers included."""

    def __post_init__(self) -> None:
        if not self.model or self.model.endswith(SPARSE):
            raise ValueError(f"got model={self.model!r}, expected a name that is no alias")
        for budget in (self.budget, self.sparse_budget):
            if fidelity_of(budget) is None:
                check_budget(budget)
        counts = "max_tokens max_requests store_tokens turn_tokens write_behind_bytes"
        for name in (*counts.split(), "max_body_bytes"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("warm_tokens", self.warm_tokens, least=0)
        for name in ("prune_s", "body_s", "request_s", "send_s", "drain_s"):
            check_number(name, getattr(self, name))
            if not 0 < getattr(self, name) <= 86_400:
                raise ValueError(
                    f"got {name}={getattr(self, name)}, expected seconds above 0, at most a day"
                )
