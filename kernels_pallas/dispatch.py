"""Which implementation of a kernel runs: asked for by name, or chosen from the backend in use."""

from __future__ import annotations

import importlib
from typing import Any, Literal, get_args

import jax

__all__ = ["Implementation", "dispatch"]

Implementation = Literal["auto", "reference", "mosaic_gpu", "tpu"]

_OF_BACKEND = {"gpu": "mosaic_gpu", "tpu": "tpu"}


def dispatch(implementation: Implementation, package: str, function: str, *args: Any) -> Any:
    """Calls `function` of the module of `package` that is named like the implementation.

    "auto" takes the kernel of `jax.default_backend()`, while tracing, and the reference where
    there is none or where it raises NotImplementedError for these shapes. Modules are imported
    when first called, so that a machine never loads the kernels of another.

    Raises:
      ValueError: no such implementation.
      NotImplementedError: the kernel asked for by name cannot take these shapes or dtypes.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"got implementation {implementation!r}, expected one of {get_args(Implementation)}"
        )
    name: str = implementation
    if implementation == "auto":
        name = _OF_BACKEND.get(jax.default_backend(), "reference")
        if name != "reference":
            try:
                return _load(package, name, function)(*args)
            except NotImplementedError:
                name = "reference"
    return _load(package, name, function)(*args)


def _load(package: str, name: str, function: str) -> Any:
    return getattr(importlib.import_module(f"{package}.{name}"), function)
