"""What a GPU must be able to do before a kernel is handed to it."""

from __future__ import annotations

from ckv_jax.kernels_pallas.target import Target

__all__ = ["require_tma", "require_wgmma"]


def require_tma(target: Target) -> None:
    """Raises NotImplementedError for a GPU older than Hopper, which has no tensor memory unit."""
    if target.capability is None or target.capability[0] < 9:
        raise NotImplementedError(
            f"got compute capability {target.capability}, expected (9, 0) or newer"
        )


def require_wgmma(target: Target) -> None:
    """Raises NotImplementedError for a GPU that is not of the Hopper family (sm_90a)."""
    if target.capability is None or target.capability[0] != 9:
        raise NotImplementedError(f"got compute capability {target.capability}, expected (9, 0)")
