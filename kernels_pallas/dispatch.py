"""Which implementation of a kernel runs on a target: asked for by name, or the first that can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from ckv_jax.kernels_pallas.target import Target

Implementation = Literal["auto", "reference", "mosaic_gpu", "tpu", "cpu"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation: how to import it, and the only platform where "auto" may take it.

    One that has a platform is called with `target=` beside its arguments, a jnp reference that
    multiplies with `widen=`, see `Target.widens`.
    """

    load: Callable[[], Callable[..., Any]]
    """Imports it: called when it is first needed, so that no machine loads another's kernels."""
    platform: str | None = None
    multiplies: bool = False
    """A reference with products in it."""

    def run(self, target: Target, *args: Any) -> Any:
        """Its outcome on a target."""
        if self.platform is not None:
            return self.load()(*args, target=target)
        return self.load()(*args, **({"widen": target.widens} if self.multiplies else {}))


class Choice(NamedTuple):
    """What ran, and why it was not what comes before it in the order."""

    kernel: str
    implementation: str
    refused: tuple[str, ...]
    """Why others did not, each "NAME does not: …"; empty where the first that may run did."""


_made: ContextVar[list[Choice] | None] = ContextVar("choices", default=None)


@contextmanager
def choices() -> Iterator[list[Choice]]:
    """Lists what `dispatch` chooses in this context, in order: wrap the tracing of a program."""
    outer, made = _made.get(), list[Choice]()
    token = _made.set(made)
    try:
        yield made
    finally:
        _made.reset(token)
        if outer is not None:
            outer.extend(made)


def dispatch(
    name: str,
    implementation: Implementation,
    kernels: Mapping[str, Kernel],
    target: Target,
    *args: Any,
) -> Any:
    """Calls one of the implementations of kernel `name`, in the order in which "auto" tries them.

    "auto" passes over an implementation that raises NotImplementedError for these shapes on this
    target: what runs in its place, and why, is logged as a warning once in a process, and noted
    for `choices`.

    Raises:
      ValueError: no such implementation.
      NotImplementedError: the one asked for by name, or every one, refuses; it says why.
    """
    if implementation != "auto":
        if implementation not in kernels:
            expected = ("auto", *kernels)
            raise ValueError(f"got implementation {implementation!r}, expected one of {expected}")
        kernels = {implementation: kernels[implementation]}
    refused: list[str] = []
    for key, kernel in kernels.items():
        if implementation == "auto" and kernel.platform not in (None, target.platform):
            continue
        try:
            out = kernel.run(target, *args)
        except NotImplementedError as error:
            if implementation != "auto":
                raise
            refused.append(f"{key} does not: {error}")
            continue
        if refused:
            _warn_once(f"{key} runs {name}; {'; '.join(refused)}")
        if (made := _made.get()) is not None:
            made.append(Choice(name, key, tuple(refused)))
        return out
    raise NotImplementedError("; ".join(refused))


@cache
def _warn_once(line: str) -> None:
    _log.warning("%s", line)
