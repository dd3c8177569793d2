"""Tenants: which API key is whose, and what its owner may use."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ckv_jax.server.errors import ApiError
from ckv_jax.storage import tenant as marks

_FIELDS = {"keys", "salt", "max_requests", "max_bytes"}
_FEWEST_CHARACTERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Someone whose prefixes exist for nobody else."""

    name: str
    """For logs and counters."""
    salt: str = field(default="", repr=False)
    """What tells its prefixes from others': no client ever names it."""
    max_requests: int | None = None
    """Texts under way at once; None: as many as the server takes."""
    max_bytes: int | None = None
    """Bytes of the store; None: as many as the store has."""


EVERYBODY = Tenant(name="default")


class Tenants:
    """All tenants of one server; without any, everybody is one, whatever key they send."""

    def __init__(self, keys: dict[str, Tenant] | None = None) -> None:
        """`keys`: tenants by API key."""
        self._open = keys is None
        self._by_digest = {_digest(key): tenant for key, tenant in (keys or {}).items()}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a TOML file with one table a tenant: `keys`, and perhaps `salt` (the table's name
        without it), `max_requests`, `max_bytes`.

        Raises `ValueError`, which repeats no key, for a file that says anything else.
        """
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"the key file {path} is no TOML: {error}") from None
        keys: dict[str, Tenant] = {}
        salts: set[str] = set()
        for name, table in tables.items():
            try:
                tenant, its_keys = _tenant(name, table)
            except ValueError as error:
                raise ValueError(f"the key file {path}, [{name}]: {error}") from None
            if tenant.salt in salts or not keys.keys().isdisjoint(its_keys):
                raise ValueError(f"the key file {path}, [{name}]: its salt or key is another's too")
            salts.add(tenant.salt)
            keys.update(dict.fromkeys(its_keys, tenant))
        if not keys:
            raise ValueError(f"the key file {path} has no tenants, expected a table for each")
        return cls(keys)

    def of(self, authorization: str | None) -> Tenant:
        """Whose request this is, by its `Authorization` header. Raises `ApiError` 401."""
        if self._open:
            return EVERYBODY
        scheme, _, key = (authorization or "").partition(" ")
        tenant = self._by_digest.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise ApiError(401, "no API key, or one that is not known", code="invalid_api_key")
        return tenant

    def all(self) -> Iterable[Tenant]:
        """Everyone there is."""
        return [EVERYBODY] if self._open else list(dict.fromkeys(self._by_digest.values()))


def _digest(key: str) -> bytes:
    """What keys are looked up by: how long that takes tells nothing of them."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _tenant(name: str, table: Any) -> tuple[Tenant, list[str]]:
    if not isinstance(table, dict):
        raise ValueError("expected a table")
    if unknown := sorted(table.keys() - _FIELDS):
        raise ValueError(f"got {', '.join(unknown)}, expected {', '.join(sorted(_FIELDS))}")
    keys = table.get("keys")
    texts = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not keys or not texts or any(len(key.strip()) < _FEWEST_CHARACTERS for key in keys):
        raise ValueError(f"keys: expected texts of at least {_FEWEST_CHARACTERS} characters")
    for bound in ("max_requests", "max_bytes"):
        value = table.get(bound)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{bound}: got {value!r}, expected a whole number, at least 1")
    tenant = Tenant(
        name=name,
        salt=marks.check(table.get("salt", name)),
        max_requests=table.get("max_requests"),
        max_bytes=table.get("max_bytes"),
    )
    return tenant, [key.strip() for key in keys]
