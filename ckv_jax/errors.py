"""What can go wrong above the store, in one family; and checks of the values that callers give."""

from __future__ import annotations

from numbers import Integral, Real

from ckv_jax.storage.errors import CkvError as CkvError


class CheckpointError(CkvError):
    """A checkpoint that is missing something, or holds something it should not."""


class UnsupportedModel(CkvError):
    """A model configuration that this engine cannot honour; the message gives the reason."""


class ContextOverflow(CkvError):
    """Prefix and suffix together are longer than the model's context."""


class Cancelled(CkvError):
    """The caller gave the request up before its answer was there."""


class DeadlineExceeded(CkvError):
    """The request's deadline passed before its first token was there."""


class EngineClosed(CkvError):
    """The engine was closed before the request's turn came."""


class WrongType(TypeError, ValueError):
    """A value of a type that cannot be meant: a `TypeError` to Python, and like every other value
    that a caller got wrong a `ValueError`, so that code which handles those handles it."""


def check_whole(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raises unless `value` is an integer (Python's or numpy's) in [least, most]: `WrongType`, or
    `ValueError` for one outside."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= value or (most is not None and value > most):  # type: ignore[operator]
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        kind = WrongType if not isinstance(value, Real) or isinstance(value, bool) else ValueError
        raise kind(f"got {name}={value!r}, expected a whole number, {bounds}")


def check_number(name: str, value: object) -> None:
    """Raises `WrongType` unless `value` is a real number; its range is the caller's to check."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise WrongType(f"got {name}={value!r}, expected a number")


def check_text(text: str) -> None:
    """Raises `ValueError` for a string that no file and no tokenizer can hold: half characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"got {text[error.start]!a} at character {error.start}, which is half of one; "
            "expected Unicode text"
        ) from error
