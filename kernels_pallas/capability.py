"""What a GPU must be able to do before a kernel is handed to it."""

from __future__ import annotations

import jax

__all__ = ["require_tma", "require_wgmma"]


def require_tma() -> None:
    """Raises NotImplementedError on a GPU older than Hopper, which has no tensor memory unit."""
    capability = _capability()
    if capability is not None and capability[0] < 9:
        raise NotImplementedError(f"got compute capability {capability}, expected (9, 0) or newer")


def require_wgmma() -> None:
    """Raises NotImplementedError on a GPU that is not of the Hopper family (sm_90a)."""
    capability = _capability()
    if capability is not None and capability[0] != 9:
        raise NotImplementedError(f"got compute capability {capability}, expected (9, 0)")


def _capability() -> tuple[int, int] | None:
    """None where the default backend is no GPU: the kernel is lowered or interpreted there."""
    if jax.default_backend() != "gpu":
        return None
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    return int(major), int(minor)
