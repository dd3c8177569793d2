"""The command line, `ckv`: demo, ingest, ask, batch, convert, inspect, verify, prune, pin."""

from __future__ import annotations

from ckv_jax.cli.app import main

__all__ = ["main"]
