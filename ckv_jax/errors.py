"""Errors of the engine, and checks of arguments."""

from __future__ import annotations

from numbers import Integral, Real
from typing import get_args

from ckv_jax.storage.errors import CkvError as CkvError


class CheckpointError(CkvError):
    """A checkpoint is missing, incomplete or malformed; the message names the file."""


class UnsupportedModel(CkvError):
    """The model's architecture or configuration is not supported; the message gives the reason."""


class ContextOverflow(CkvError):
    """Prefix, suffix and new tokens together are longer than the model's context."""


class Cancelled(CkvError):
    """The caller cancelled the request before it had an answer."""


class DeadlineExceeded(CkvError):
    """The request's deadline passed before its first token."""


class EngineClosed(CkvError):
    """The engine was closed before it ran the request, or it belongs to another process."""


class WrongType(TypeError, ValueError):
    """An argument has the wrong type. Both a `TypeError` and a `ValueError`, so that handlers of
    invalid values catch it too."""


def check_whole(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Checks that `value` is an integer (Python's or numpy's) in [least, most]; raises `WrongType`
    for another type, `ValueError` for an integer outside."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= value or (most is not None and value > most):  # type: ignore[operator]
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        kind = WrongType if not isinstance(value, Real) or isinstance(value, bool) else ValueError
        raise kind(f"got {name}={value!r}, expected a whole number, {bounds}")


def check_number(name: str, value: object) -> None:
    """Checks that `value` is a real number of any size; raises `WrongType` otherwise."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise WrongType(f"got {name}={value!r}, expected a number")


def check_one_of(name: str, value: object, kind: object) -> None:
    """Checks that `value` is one of a `Literal`'s; raises `ValueError` otherwise."""
    if value not in get_args(kind):
        raise ValueError(f"got {name}={value!r}, expected one of {', '.join(get_args(kind))}")


def check_text(text: str) -> None:
    """Checks that a string has no lone surrogates, which UTF-8 cannot encode; else `ValueError`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"got {text[error.start]!a} at character {error.start}, which is half of one (a lone "
            "surrogate); expected Unicode text"
        ) from error
