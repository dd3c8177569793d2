"""Tenants as the disk knows them: by a mark that does not give their salt away."""

from __future__ import annotations

import hashlib

PUBLIC = ""
"""The mark of what has no salt."""

_LARGEST = 4096  # characters of a salt


def mark(salt: str) -> str:
    """32 hex digits that stand for a salt; PUBLIC for the empty one."""
    return hashlib.sha256(f"ckv-tenant\0{salt}".encode()).hexdigest()[:32] if salt else PUBLIC


def check(salt: str) -> str:
    """`salt`; raises ValueError for what none can be."""
    if not isinstance(salt, str) or "\0" in salt or len(salt) > _LARGEST:
        raise ValueError(f"salt: expected text of at most {_LARGEST} characters, without NUL")
    return salt


def unsaid(tenant: str) -> str:
    """What stands for the salt of a tenant's prefix where nobody said it: equal to no salt."""
    return f"\0{tenant}" if tenant else ""
