"""The command line, `ckv`."""

from __future__ import annotations

from ckv_jax.cli.interrupt import leaving_at_once

__all__ = ["main"]


def main() -> None:
    """Run `ckv`: see `ckv_jax.cli.app.main`, whose imports take a second."""
    with leaving_at_once():
        from ckv_jax.cli.app import main as run
    run()
