"""Which implementation of a kernel runs: asked for by name, or the first that can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

__all__ = ["Implementation", "Kernel", "dispatch"]

Implementation = Literal["auto", "reference", "mosaic_gpu", "tpu"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation: how to import it, and the only backend where "auto" may take it."""

    load: Callable[[], Callable[..., Any]]
    """Imports it: called when it is first needed, so that no machine loads another's kernels."""
    backend: str | None = None


def dispatch(implementation: Implementation, kernels: Mapping[str, Kernel], *args: Any) -> Any:
    """Calls one of a kernel's implementations, which are in the order in which "auto" tries them.

    "auto" asks `jax.default_backend()`, while tracing, and passes over an implementation that
    raises NotImplementedError for these shapes; which one ran instead, and why, is logged at INFO.

    Raises:
      ValueError: no such implementation.
      NotImplementedError: the one asked for by name, or every one, refuses; it says why.
    """
    if implementation == "auto":
        return _first(kernels, args)
    if implementation not in kernels:
        expected = ("auto", *kernels)
        raise ValueError(f"got implementation {implementation!r}, expected one of {expected}")
    return kernels[implementation].load()(*args)


def _first(kernels: Mapping[str, Kernel], args: tuple[Any, ...]) -> Any:
    here = (None, jax.default_backend())
    refusals: list[str] = []
    for name, kernel in kernels.items():
        if kernel.backend not in here:
            continue
        run = kernel.load()
        try:
            out = run(*args)
        except NotImplementedError as error:
            refusals.append(f"{name} does not: {error}")
            continue
        if refusals:
            _log.info("%s runs %s; %s", name, run.__name__, "; ".join(refusals))
        return out
    raise NotImplementedError("; ".join(refusals))
