"""What a server is told: whom it serves as, and how much it takes on."""

from __future__ import annotations

from dataclasses import dataclass

from ckv_jax.config import check_budget
from ckv_jax.validate import check_number, check_whole

SPARSE = ":sparse"
"""What follows the model's name in the alias that answers by the sparse preset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Names, defaults and limits of one server."""

    model: str
    """The name that clients know the model by; with `SPARSE` behind it, its sparse preset."""
    budget: float | str = 1.0
    """What of a stored prefix takes part in an answer, where a request says nothing (see
    `Request.budget`): all of it, so that answers are exact."""
    sparse_budget: float | str = 0.25
    """The same of the alias."""
    max_tokens: int = 1024
    """New tokens of a chat's answer where a request names no number and the context has room."""
    max_requests: int = 64
    """Texts computed or waiting at once; who comes then is told to come again (429)."""
    max_choices: int = 16
    """Texts that one request may ask for."""
    warm_tokens: int = 0
    """What prompts of about so many tokens need is compiled before the server says that it is
    ready; 0: everything is compiled when it is first needed."""
    store_tokens: int = 1024
    """Prompts of at least so many tokens are stored, with their answers."""
    turn_tokens: int = 64
    """Fewer tokens than that, prompt and answer, are not worth a write of their own."""
    guard_disk: bool = True
    """Pass turns over while writing them takes longer than computing them did."""
    behind_bytes: int = 2**30
    """Host memory that turns may hold while they wait to be written."""
    prune_s: float = 60.0
    """How often what has outlived its time is looked for and removed."""
    max_body_bytes: int = 16 * 2**20
    body_s: float = 30.0
    """Seconds in which a request's body has to be there."""
    request_s: float = 600.0
    """Seconds after which an answer ends with what there is."""
    send_s: float = 60.0
    """Seconds that a client may leave a piece of its answer unread."""
    drain_s: float = 60.0
    """Seconds that answers under way have to end in once the server was told to stop."""

    def __post_init__(self) -> None:
        if not self.model or self.model.endswith(SPARSE):
            raise ValueError(f"got model={self.model!r}, expected a name that is no alias")
        check_budget(self.budget)
        check_budget(self.sparse_budget)
        for name in (
            "max_tokens", "max_requests", "max_choices", "store_tokens", "turn_tokens",
            "behind_bytes", "max_body_bytes",
        ):  # fmt: skip
            check_whole(name, getattr(self, name), least=1)
        check_whole("warm_tokens", self.warm_tokens, least=0)
        for name in ("prune_s", "body_s", "request_s", "send_s", "drain_s"):
            check_number(name, getattr(self, name))
            if not 0 < getattr(self, name) <= 86_400:
                raise ValueError(
                    f"got {name}={getattr(self, name)}, expected seconds above 0, at most a day"
                )
