"""Checks of single values that callers give: each error says what was got and what is expected."""

from __future__ import annotations

from numbers import Integral, Real

__all__ = ["WrongType", "check_number", "check_text", "check_whole"]


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
