"""Which implementation of a kernel runs: asked for by name, or chosen from the backend in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax

__all__ = ["Implementation", "dispatch"]

Implementation = Literal["auto", "reference", "mosaic_gpu", "tpu"]
Result = TypeVar("Result")

_OF_BACKEND = {"gpu": "mosaic_gpu", "cuda": "mosaic_gpu", "tpu": "tpu"}


def dispatch(
    implementation: Implementation, kernels: Mapping[str, Callable[..., Result]], *args: Any
) -> Result:
    """Calls `kernels[implementation]`; "auto" takes the backend's kernel and, where that one
    raises NotImplementedError for these shapes, the reference.

    The choice is made while tracing, from `jax.default_backend()`.

    Raises:
      ValueError: the name is none of `kernels` nor "auto".
      NotImplementedError: the kernel asked for by name cannot take these shapes or dtypes.
    """
    if implementation != "auto":
        if implementation not in kernels:
            expected = ", ".join(["auto", *kernels])
            raise ValueError(f"got implementation {implementation!r}, expected one of {expected}")
        return kernels[implementation](*args)
    name = _OF_BACKEND.get(jax.default_backend(), "reference")
    try:
        return kernels[name](*args)
    except NotImplementedError:
        return kernels["reference"](*args)
