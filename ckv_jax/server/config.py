"""Configuration of a server: `ServerConfig`, with its model's name, defaults and limits, and the
`Settings` of replicas on Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckv_jax.config import check_budget
from ckv_jax.errors import check_number, check_whole
from ckv_jax.fidelity import fidelity_of
from ckv_jax.server.tenants import Tenants

SPARSE = ":sparse"
"""Suffix of the model's name in the alias that answers at `ServerConfig.sparse_budget`."""
MOST_GENERATIONS = 16
"""Maximum number of generations of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Names, defaults and limits of one server. Raises `ValueError` for a value out of range."""

    model: str
    """The model's name for clients."""
    budget: float | str = 1.0
    """Default budget of requests (see `Engine.ask`); 1: answers are exact."""
    sparse_budget: float | str = 0.25
    """Default budget of requests to the model's sparse alias."""
    max_tokens: int = 1024
    """Default maximum of new tokens in a chat's answer; fewer where the context has less room."""
    max_requests: int = 64
    """Generations running or waiting at once; further requests get status 429."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Default variables of the chat template, such as `enable_thinking`."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the API from a browser (CORS); "*": all."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests without keys may use, besides IP addresses, names without a dot and
    the machine's name; ".name" includes all subdomains."""
    warm_tokens: int = 0
    """Length of the prompts, in tokens, whose programs are compiled before the server is ready; 0:
    programs are compiled at first use."""
    store_tokens: int = 1024
    """Minimum tokens of a prompt that is stored after its answer."""
    turn_tokens: int = 64
    """Minimum new tokens, of prompt and answer, that are written to the store."""
    guard_disk: bool = True
    """Whether turns are skipped while writing them takes longer than computing them."""
    write_behind_bytes: int = 2**30
    """Host memory, in bytes, for turns that wait to be written."""
    prune_s: float = 60.0
    """Seconds between removals of expired prefixes."""
    max_body_bytes: int = 16 * 2**20
    """Largest body of a request, in bytes; a larger one gets status 413."""
    body_s: float = 30.0
    """Time limit, in seconds, for the arrival of a request's body."""
    request_s: float = 600.0
    """Time limit of a generation, in seconds; it ends with the tokens generated so far."""
    send_s: float = 60.0
    """Seconds after which an answer ends if its client does not read it."""
    drain_s: float = 60.0
    """Time limit of a shutdown, in seconds, with running answers."""

    def __post_init__(self) -> None:
        if not self.model or self.model.endswith(SPARSE):
            raise ValueError(
                f"got model={self.model!r}, expected a non-empty name without {SPARSE} at its end"
            )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one deployment on Ray Serve, the arguments of `ckv_jax.server.ray_app:build`."""

    checkpoint: str
    """Path of the model, on every node."""
    store: str
    """Folder or URL of the store, shared by all nodes."""
    name: str
    """The model's name for clients."""
    replicas: int = 2
    """Number of replicas."""
    cpus: float = 1.0
    """CPUs of each replica."""
    gpus: float = 0.0
    """GPUs of each replica."""
    api_keys: str | None = None
    """Path of the key file, on every node."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ServerConfig` other than `model`, such as `max_requests` (of one replica),
    `budget`, `store_tokens`, `warm_tokens`, `drain_s`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig`, such as `dtype` (default: bfloat16), `system`,
    `device_cache_bytes`."""
    storage: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `StoreConfig`, such as `max_bytes`; quotas come from the key file."""

    @property
    def config(self) -> ServerConfig:
        """The configuration of each replica. Raises `TypeError` and `ValueError`."""
        return ServerConfig(model=self.name, **self.server)

    def tenants(self) -> Tenants:
        """Loads the tenants of the key file. Raises `ValueError`."""
        return Tenants.load(Path(self.api_keys)) if self.api_keys else Tenants()
